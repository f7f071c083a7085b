"""Starts a planned run in a process of its own, passes its signals and words on, and reads what it left."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from memfit.core.errors import BadInput, DoesNotFit, Interrupted, MemfitError, RunFailed
from memfit.core.job import Job
from memfit.core.plan import Plan
from memfit.core.words import language, say
from memfit.run.folder import RunFolder, RunResult, default_folder, kept
from memfit.run.memory import child_environment
from memfit.run.process import DEFAULT_THREADS, from_message, target_device

__all__ = ["RunResult", "run_planned"]
Progress = Callable[[dict[str, Any]], None]


def run_planned(
    job: Job, plan: Plan, folder: str | Path | None = None, on_progress: Progress | None = None
) -> RunResult:
    """Runs a plan for real, in a fresh process, and returns its result. A finished run is read, not run
    again.

    Args:
        folder: default: the job's ``run.folder``, else one under ``runs/`` named after the job.
        on_progress: told of each step: ``{"step", "steps", "loss", "items_per_second", "memory_bytes",
            "peak_bytes", "budget_bytes"}`` (see :func:`memfit.run.train.train`).

    Raises:
        DoesNotFit: the plan does not. BadInput: folder, data or device cannot be used.
        RunFailed: the run stopped. Interrupted: by a signal; the state is saved.
    """
    check_plan(plan)
    run = RunFolder(folder or job.run.folder or default_folder(job))
    with run.locked():
        run.check(job)
        if run.steps_done() >= job.task.steps:
            done = run.result()
            if done is not None:
                note = say("run.already_done", steps=run.steps_done(), folder=str(run.path))
                return msgspec.structs.replace(done, notes=(*done.notes, note))
        run.begin(job, plan)
        child = _Child(run, job.run.threads or DEFAULT_THREADS, on_progress)
        if job.data.path is not None or job.data.classes:
            child.run("data")
        child.run("train")
        result = run.result()
    if result is None:
        raise RunFailed("run.no_measure")
    return result


def check_plan(plan: Plan) -> None:
    """Raises DoesNotFit where a plan does not, BadInput where it is for a device that this machine is not."""
    if not plan.fits:
        at = plan.profile.peak_at
        raise DoesNotFit(
            "api.nothing_fits", needed=plan.profile.process_bytes, budget=plan.budget_bytes,
            phase=say(f"phase.{at.phase}"), module=at.module or "-", strategies=_shown(plan.strategies),
            needs="; ".join(plan.needs) or "-",
        )  # fmt: skip
    device = target_device(plan.device)
    if device.is_cpu:
        return
    here = target_device("auto")
    if here.name != device.name:
        raise BadInput("run.other_device", setting="budget.device", value=device.name, here=here.name)


def _shown(entries: tuple[dict[str, Any], ...]) -> str:
    """``name (option=value), …``, or "-"."""
    parts = []
    for entry in entries:
        options = ", ".join(f"{k}={v}" for k, v in entry.items() if k != "name")
        parts.append(f"{entry['name']} ({options})" if options else entry["name"])
    return ", ".join(parts) or "-"


class _Child:
    """One child process after another, in one run folder."""

    def __init__(self, run: RunFolder, threads: int, on_progress: Progress | None) -> None:
        self.run_folder = run
        self.threads = threads
        self.on_progress = on_progress
        self.step = 0
        self.signals = 0

    def run(self, part: str) -> None:
        """Raises the error that the child told of, or one that says how it ended."""
        self.error: MemfitError | None = None
        command = [sys.executable, "-m", "memfit.run.worker", str(self.run_folder.path), part, language()]
        with self.run_folder.log.open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                env=child_environment(self.threads), start_new_session=True,
            )  # fmt: skip
        assert process.stdout is not None
        try:
            with self._passing_signals(process), process.stdout:
                for line in process.stdout:
                    self._hear(msgspec.json.decode(line))
                status = process.wait()
        finally:
            if process.poll() is None:  # the callback raised, or we are asked to end
                process.kill()
                process.wait()
        self._judge(status)

    def _judge(self, status: int) -> None:
        if self.error is not None:
            self._log(str(self.error))
            raise self.error
        if status == 0:
            return
        saved = kept(self.run_folder.checkpoints)
        if self.signals:
            raise Interrupted("run.interrupted_hard", step=self.step, kept=saved)
        figures = {"step": self.step, "kept": saved, "log": self._tail()}
        if status < 0:
            raise RunFailed("run.killed", signal=signal.Signals(-status).name, **figures)
        raise RunFailed("run.ended", status=status, **figures)

    def _hear(self, message: dict[str, Any]) -> None:
        event = message.pop("event")
        if event == "error":
            self.error = from_message(message)
        elif event == "note":
            self._log(message["text"])
        elif event == "progress":
            self.step = message["step"]
            if self.on_progress is not None:
                self.on_progress(message)

    @contextmanager
    def _passing_signals(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """SIGINT and SIGTERM reach the child, which saves and ends; the second one ends it at once."""

        def forward(number: int, frame: FrameType | None) -> None:
            self.signals += 1
            if self.signals == 1:
                process.send_signal(number)
            else:
                process.kill()

        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
            yield
            return
        before = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _log(self, text: str) -> None:
        with self.run_folder.log.open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now().isoformat(timespec='seconds')} {text}\n")

    def _tail(self) -> str:
        lines = self.run_folder.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) or "-"
