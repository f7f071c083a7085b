"""Measuring one real step: what was allocated (recorder), what the process held (kernel), how long it
took."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from memfit.core.job import Job
from memfit.core.profile import Allocation, Profile
from memfit.core.step import Batch
from memfit.engines.in_process import Prepared
from memfit.run.memory import child_environment
from memfit.run.process import DEFAULT_THREADS
from memfit.run.world import RealWorld
from memfit.simulate.depth import block_paths
from memfit.simulate.profile_of import profile_of
from memfit.simulate.recorder import Recorder
from memfit.simulate.simulator import trace_of, track_all


def measure_step(
    prepared: Prepared, window: Batch, world: RealWorld, micro_batch: int | None = None
) -> tuple[float, Profile]:
    """One real optimizer step under the recorder that the simulator uses too.

    Args:
        window: the global batch; its tensors count as inputs.
        micro_batch: rows at once; None: the step's own.

    Returns:
        The loss and a Profile (origin "measured"). ``process_bytes`` is the allocator model's figure on a
        CPU: whoever has the kernel's counter puts it in. Seconds include the recorder's own time.
    """
    recorder = Recorder(prepared.step.model, block_paths(prepared.step.model), world.device)
    on_card = world.device.type == "cuda"
    if on_card:
        torch.cuda.reset_peak_memory_stats(world.device)
    hooks = track_all(prepared, recorder, window.data)
    world.recorder, world.marks = recorder, []
    started = time.perf_counter()
    try:
        with recorder:
            loss = float(prepared.run(window, micro_batch))
        world.synchronize()
        stopped = time.perf_counter()
    finally:
        world.recorder = None
        for hook in hooks:
            hook.remove()
    recorder.classify()
    profile = profile_of(
        trace_of(recorder), world.target, origin="measured", step_seconds=stopped - started,
        phase_seconds=_phase_seconds(world.marks, stopped), uncertainty=(0.0, 0.0),
    )  # fmt: skip
    return loss, _with_card_counters(profile, world.device) if on_card else profile


def _phase_seconds(marks: list[tuple[str, float]], stopped: float) -> dict[int, float]:
    times = [moment for _, moment in marks] + [stopped]
    return {n + 1: times[n + 1] - times[n] for n in range(len(marks))}


def _with_card_counters(profile: Profile, device: torch.device) -> Profile:
    """The allocator's own counters in place of our model's; what the dispatcher did not see is workspace."""
    allocated = torch.cuda.max_memory_allocated(device)
    reserved = torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    unseen = allocated - profile.peak_bytes
    allocations = profile.allocations
    if unseen > 0:
        whole = Allocation(unseen, "workspace", "device", "", "not dispatched", "load", 0, profile.length)
        allocations = (*allocations, whole)
    return msgspec.structs.replace(
        profile, allocations=allocations, peak_bytes=allocated, reserved_bytes=reserved,
        process_bytes=total - free + reserved - torch.cuda.memory_reserved(device),
    )  # fmt: skip


def feeding_card(prepared: Prepared, world: RealWorld) -> Prepared:
    """On a card the window stays in host memory and each micro-batch is copied when its turn comes."""
    if world.device.type == "cpu":
        return prepared
    from dataclasses import replace

    from memfit.models.batches import map_tensors

    plain = prepared.step.loss

    def loss(model: Any, data: Any) -> Any:
        return plain(model, map_tensors(data, lambda t: t.to(world.device, non_blocking=True)))

    prepared.step = replace(prepared.step, loss=loss)
    return prepared


def measure_in_child(
    job: Job, strategies: Iterable[dict[str, Any]], *, steps: int = 3, hard_limit_bytes: int | None = None,
    budget: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Runs a job's real step in a fresh process under given strategies, on a seeded example batch.

    Step 1 makes the optimizer's state, step 2 is recorded, steps 3 to ``steps`` run plainly: their process
    peak (the kernel's counter is reset before them) and the median of their seconds are what counts.

    Args:
        strategies: ``[[strategy]]`` tables; the job's own are not added.
        steps: at least 3.
        hard_limit_bytes: anonymous memory that the operating system allows the process from before the model
        is built.
        budget: bytes; adds ``within_budget`` (process peak against it).

    Returns:
        ``{"outcome": "ran" | "out-of-memory" | "failed: REASON", "where", "peak_bytes", "process_bytes",
        "start_bytes", "step_seconds", "losses", "breakdown", "peak_at", "host_peak_bytes"}``; figures that
        were not reached are None. ``where``: the phase of an out-of-memory error. ``start_bytes``: held
        before the model was built.
    """
    if steps < 3:
        raise ValueError("steps: at least 3 (one makes the optimizer's state, one is recorded, one is timed)")
    request = {
        "job": job.to_dict(), "strategies": list(strategies), "steps": steps,
        "hard_limit_bytes": hard_limit_bytes,
    }  # fmt: skip
    threads = job.run.threads or DEFAULT_THREADS
    done = subprocess.run(
        [sys.executable, "-m", "memfit.run.child"], input=msgspec.json.encode(request), capture_output=True,
        env=child_environment(threads), check=False,
    )  # fmt: skip
    result = empty_result()
    lines = done.stdout.splitlines()
    if lines:
        result |= msgspec.json.decode(lines[-1])
    else:
        tail = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        result["outcome"] = f"failed: exit status {done.returncode} {' '.join(tail)}"
    if budget is not None and result["process_bytes"] is not None:
        result["within_budget"] = result["process_bytes"] <= budget
    return result


def empty_result() -> dict[str, Any]:
    keys = ("outcome", "where", "peak_bytes", "process_bytes", "start_bytes", "step_seconds", "breakdown",
            "peak_at", "host_peak_bytes")  # fmt: skip
    return {**dict.fromkeys(keys), "losses": []}


def median(seconds: list[float]) -> float:
    """Of the steps after the first (which warms caches up), if there are any."""
    return statistics.median(seconds[1:] or seconds) if seconds else 0.0
