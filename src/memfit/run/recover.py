"""Out of memory inside a step: the step is undone and done again whole with half the micro-batch.

Recovery starts after the ``except`` block has been left and the error's frames are cleared: while they live
they hold the very activations that did not fit. Until the optimizer's update nothing of the step's start has
changed but gradients and the random numbers' position, so these two are put back. The window is the same, and
so is the global batch: the loss equals that of an undisturbed run (to rounding; dropout draws other masks for
other micro-batches).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from memfit.core.errors import MemfitError, RunFailed
from memfit.core.words import say
from memfit.engines.in_process import Prepared
from memfit.run.checkpoint import random_state, set_random_state
from memfit.run.memory import drop_frames, is_out_of_memory, peak_anonymous_bytes
from memfit.run.process import one_line
from memfit.run.world import RealWorld

T = TypeVar("T")


@dataclass(frozen=True)
class OutOfMemory:
    """What was going on. ``held_bytes``: the process's peak; ``reason``: the error's own words."""

    step: int
    phase: str
    micro_batch: int
    held_bytes: int
    reason: str


def attempt(run: Callable[[], T]) -> tuple[T | None, str | None]:
    """What ``run`` returns, or the words of its out-of-memory error, of which nothing else is left alive."""
    try:
        return run(), None
    except (RuntimeError, MemoryError, MemfitError) as error:  # a model's builder wraps what it catches
        if not is_out_of_memory(error):
            raise
        reason = one_line(error)
        drop_frames(error)
    return None, reason


def run_whole(
    prepared: Prepared, world: RealWorld, micro_batch: int, run: Callable[[int], T], *, step: int,
    budget_bytes: int, kept: str, on_recovery: Callable[[OutOfMemory, int], None],
) -> tuple[T, int]:  # fmt: skip
    """Runs one step with as large a micro-batch as fits, from ``micro_batch`` down. Returns its value and the
    rows.

    Args:
        run: (micro_batch) -> the step's value; called again after a recovery.
        kept: the newest checkpoint, for the messages. on_recovery: told of each failure and the next
        micro-batch.

    Raises:
        RunFailed: out of memory at a micro-batch of 1, in the optimizer's update, or where batch statistics
            forbid smaller batches.
    """
    while True:
        random = random_state()
        value, reason = attempt(partial(run, micro_batch))
        if reason is None:
            return value, micro_batch  # type: ignore[return-value]
        failure = OutOfMemory(step, world.phase_name, micro_batch, _held(world), reason)
        _let_go(prepared, world)
        set_random_state(random)
        bound = "batch-statistics" in prepared.step.capabilities
        if bound or micro_batch == 1 or failure.phase == "optimizer":
            raise _hopeless(failure, budget_bytes, kept)
        micro_batch = -(-micro_batch // 2)
        on_recovery(failure, micro_batch)


def _held(world: RealWorld) -> int:
    on_card = world.device.type == "cuda"
    return torch.cuda.max_memory_allocated(world.device) if on_card else peak_anonymous_bytes()


def _let_go(prepared: Prepared, world: RealWorld) -> None:
    prepared.optimizer.zero_grad(set_to_none=True)
    prepared.step.model.zero_grad(set_to_none=True)
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _hopeless(failure: OutOfMemory, budget_bytes: int, kept: str) -> RunFailed:
    key = "run.out_of_memory"
    if failure.phase == "optimizer":
        key = "run.out_of_memory_update"
    elif failure.micro_batch > 1:
        key = "run.out_of_memory_statistics"
    return RunFailed(key, phase=say(f"phase.{failure.phase}"), step=failure.step, held=failure.held_bytes,
                     budget=budget_bytes, reason=failure.reason, kept=kept)  # fmt: skip
