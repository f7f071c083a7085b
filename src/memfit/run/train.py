"""The training loop behind ``fit``: real steps inside the budget, saved, measured and judged."""

from __future__ import annotations

import math
import random
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
from torch.utils.weak import WeakIdKeyDictionary

from memfit.core.errors import Interrupted, RunFailed
from memfit.core.job import Job
from memfit.core.plan import Plan, judge
from memfit.core.step import Batch
from memfit.core.words import say
from memfit.engines.in_process import Prepared, prepare
from memfit.models import build_step
from memfit.run import checkpoint
from memfit.run.folder import Loss, RunFolder, RunResult, Summary, complete, kept
from memfit.run.measure import feeding_card, measure_step, median
from memfit.run.memory import hard_limit, room_for_recorder
from memfit.run.meter import Meter
from memfit.run.process import Tell, start_libraries, target_device
from memfit.run.recover import OutOfMemory, attempt, run_whole
from memfit.run.streams import Stream, stream_for
from memfit.run.world import RealWorld
from memfit.strategies import apply_all, read_strategy


def train(job: Job, plan: Plan, folder: str | Path, tell: Tell | None = None) -> RunResult:
    """Trains a job under a plan to its last step, in this process.

    Goes on from the newest checkpoint in the folder, if there is one, exactly where it was. For the figures
    of the kernel and the hard limit to be good, the process is a fresh one with malloc's settings: see
    :func:`memfit.run.launch.run_planned`.

    Args:
        folder: claimed and checked already (:class:`memfit.run.folder.RunFolder`).
        tell: told of each event: ``{"event": "progress", "step", "steps", "loss", "items_per_second",
            "memory_bytes", "peak_bytes", "budget_bytes"}`` and ``{"event": "note", "text"}``.

    Raises:
        RunFailed: out of memory where nothing helps, a loss that is not finite, a full disk.
        Interrupted: SIGINT or SIGTERM came; the state is saved.
        BadInput: a strategy, the data or a checkpoint cannot be used.
    """
    start_libraries(job)
    world = RealWorld(target_device(plan.device))
    with ExitStack() as stack:
        stop = stack.enter_context(Stop())
        if job.run.hard_limit and world.device.type == "cpu":
            stack.enter_context(hard_limit(plan.budget_bytes))
        meter = Meter(world)
        place, listener = RunFolder(folder), tell or (lambda event: None)
        loop, reason = attempt(lambda: _start(job, plan, place, world, meter, listener))
        if loop is None:
            raise RunFailed("run.out_of_memory_start", held=meter.peak_bytes(), budget=plan.budget_bytes,
                            reason=reason)  # fmt: skip
        return loop.run(stop)


def _start(job: Job, plan: Plan, folder: RunFolder, world: RealWorld, meter: Meter, tell: Tell) -> Loop:
    """Builds the real step, applies the plan, and loads the newest checkpoint."""
    step = build_step(job, world)
    names = checkpoint.original_names(step.model)
    step = apply_all([read_strategy(entry) for entry in plan.strategies], step, world)
    prepared = feeding_card(prepare(step, world), world)
    stream = stream_for(job, step, world)
    loop = Loop(job, plan, folder, world, prepared, stream, names, meter, tell, micro_batch=step.micro_batch)
    loop.note(stream.description)
    for note in step.notes:
        loop.note(note)
    _seed(job.run.seed)
    checkpoint.clear_unfinished(folder.checkpoints)
    found = complete(folder.checkpoints)
    if found:
        state = checkpoint.load(found[-1], prepared, names)
        stream.restore(state.stream)
        loop.resume(state, found[-1])
    folder.write_losses(loop.losses)
    return loop


def _seed(seed: int) -> None:
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Stop:
    """Remembers SIGINT and SIGTERM so that the step under way can end and be saved. The second one ends the
    process as it would have without us. Only the main thread may ask for this; elsewhere nothing is
    changed."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)


@dataclass
class Loop:
    """The run's state between steps. ``step``: steps done."""

    job: Job
    plan: Plan
    folder: RunFolder
    world: RealWorld
    prepared: Prepared
    stream: Stream
    names: WeakIdKeyDictionary
    meter: Meter
    tell: Tell
    micro_batch: int
    step: int = 0
    saved: int = -1
    losses: list[Loss] = field(default_factory=list)
    recoveries: int = 0
    notes: list[str] = field(default_factory=list)
    resumed_from: int | None = None

    def __post_init__(self) -> None:
        self.rates = [group["lr"] for group in self.prepared.optimizer.param_groups]

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self.tell({"event": "note", "text": text})

    def resume(self, state: checkpoint.State, path: Path) -> None:
        self.step = self.saved = self.resumed_from = state.step
        self.losses = state.losses
        self.micro_batch = min(self.micro_batch, state.micro_batch)
        self.note(say("run.resumed", step=state.step, kept=str(path)))

    def run(self, stop: Stop) -> RunResult:
        """Steps to the end. See :func:`train`."""
        steps, every = self.job.task.steps, self.job.run.save_every
        first = self.step + 1
        measured = min(first + 1, steps)  # a second step has the optimizer's state
        self.meter.begin()
        for text in self.meter.notes:
            self.note(text)
        while self.step < steps:
            if stop.signal is not None:
                self._interrupt(stop.signal)
            self._one(self.step + 1, measured=self.step + 1 == measured)
            if every and self.step % every == 0 and self.step < steps:
                self.save()
        self.save()
        return self._finish()

    def _one(self, step: int, *, measured: bool) -> None:
        self._set_rate(step)
        window = self.stream.next_window()
        started = time.perf_counter()
        run = self._measured if measured else self._plain
        loss, self.micro_batch = run_whole(
            self.prepared, self.world, self.micro_batch, lambda rows: run(window, rows), step=step,
            budget_bytes=self.plan.budget_bytes, kept=kept(self.folder.checkpoints),
            on_recovery=self._recovered,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        if not math.isfinite(loss):
            self._not_finite(step, loss)
        if not measured:
            self.meter.seconds.append(seconds)
        row = Loss(step=step, loss=loss, seconds=seconds, items=window.items, micro_batch=self.micro_batch)
        self.step = step
        self.losses.append(row)
        self.folder.append("losses.jsonl", row)
        self.tell({
            "event": "progress", "step": step, "steps": self.job.task.steps, "loss": loss,
            "items_per_second": window.items / seconds, "memory_bytes": self.meter.held_bytes(),
            "peak_bytes": self.meter.peak_bytes(), "budget_bytes": self.plan.budget_bytes,
        })  # fmt: skip

    def _plain(self, window: Batch, rows: int) -> float:
        loss = float(self.prepared.run(window, rows))
        self.world.synchronize()
        return loss

    def _measured(self, window: Batch, rows: int) -> float:
        """A recorded step; the recorder's own memory stays out of the process's figures."""
        self.meter.pause()
        with room_for_recorder():
            loss, profile = measure_step(self.prepared, window, self.world, rows)
            self.folder.write_measured(profile)
        self.meter.card_process_bytes = profile.process_bytes
        del profile
        self.meter.go_on()
        return loss

    def _set_rate(self, step: int) -> None:
        """Rises from 0 to the job's learning rate over ``task.warmup_steps``, then stays."""
        share = min(1.0, step / self.job.task.warmup_steps) if self.job.task.warmup_steps else 1.0
        for group, rate in zip(self.prepared.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * share

    def _recovered(self, failure: OutOfMemory, rows: int) -> None:
        self.recoveries += 1
        row = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"), "kind": "out-of-memory",
            "step": failure.step, "phase": failure.phase, "micro_batch": failure.micro_batch,
            "next_micro_batch": rows, "held_bytes": failure.held_bytes,
            "budget_bytes": self.plan.budget_bytes, "reason": failure.reason,
        }  # fmt: skip
        self.folder.append("incidents.jsonl", row)
        self.note(say("run.recovered", phase=say(f"phase.{failure.phase}"), step=failure.step,
                      before=failure.micro_batch, after=rows))  # fmt: skip

    def _not_finite(self, step: int, loss: float) -> None:
        last = self.losses[-1] if self.losses else None
        raise RunFailed(
            "run.not_finite", step=step, value=str(loss), last=f"{last.loss:.6g}" if last else "-",
            last_step=last.step if last else "-", kept=kept(self.folder.checkpoints),
        )  # fmt: skip

    def _interrupt(self, name: str) -> None:
        if self.step > 0:
            self.save()
        raise Interrupted("run.interrupted", signal=name, step=self.step, steps=self.job.task.steps,
                          kept=kept(self.folder.checkpoints))  # fmt: skip

    def save(self) -> None:
        """A checkpoint of the state as it is, unless it is there already.

        Raises:
            RunFailed: weights are not finite (the last step's update broke them), or the disk is full.
        """
        if self.saved == self.step:
            return
        for parameter in self.prepared.step.model.parameters():
            if parameter.is_floating_point() and not math.isfinite(float(parameter.detach().sum())):
                raise RunFailed("run.weights_not_finite", step=self.step, last=f"{self.losses[-1].loss:.6g}",
                                kept=kept(self.folder.checkpoints))  # fmt: skip
        state = checkpoint.State(
            step=self.step, micro_batch=self.micro_batch, losses=self.losses, stream=self.stream.state()
        )
        checkpoint.save(self.folder.checkpoints, self.prepared, self.names, state)
        self.saved = self.step

    def _finish(self) -> RunResult:
        profile = self.folder.measured()
        if profile is None:
            raise RunFailed("run.no_measure")
        seconds = median(self.meter.seconds) or profile.step_seconds
        if self.resumed_from != self.step:  # else an earlier process has measured
            profile = msgspec.structs.replace(
                profile, process_bytes=self.meter.process_bytes(), step_seconds=seconds
            )
            self.folder.write_measured(profile)
        verdict = judge(
            self.plan.profile, profile, self.plan.budget_bytes, steps=self.step,
            recoveries=len(self.folder.incidents()), first_loss=self.losses[0].loss,
            last_loss=self.losses[-1].loss,
        )  # fmt: skip
        items = sum(row.items for row in self.losses) / len(self.losses)
        summary = Summary(
            steps=self.step, step_seconds=seconds, items_per_second=items / seconds if seconds else 0.0,
            notes=tuple(self.notes), resumed_from=self.resumed_from,
        )  # fmt: skip
        self.folder.finish(verdict, summary)
        result = self.folder.result()
        assert result is not None
        return result
