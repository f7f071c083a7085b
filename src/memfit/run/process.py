"""What every child process of memfit does first, and how it speaks to its parent: one JSON object a line."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from memfit.core import errors
from memfit.core.device import Device
from memfit.core.errors import MemfitError, MissingExtra, RunFailed
from memfit.core.job import Job

Tell = Callable[[dict[str, Any]], None]
DEFAULT_THREADS = 2
_PR_SET_PDEATHSIG = 1


def claim_stdout() -> Tell:
    """Takes standard output for messages to the parent; what libraries print goes to standard error
    instead."""
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def tell(event: dict[str, Any]) -> None:
        channel.write(msgspec.json.encode(event, enc_hook=str) + b"\n")

    return tell


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends (Linux): nobody is left to read or to stop
    it."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start_libraries(job: Job) -> None:
    """Loads all that a training step of this job will import, and starts torch's threads (whose stacks are
    address
    space): what the process holds afterwards is its context, before the first tensor of the job. An optimizer
    pulls in ``torch._dynamo`` (66 MiB with torch 2.13), a Hugging Face model
    ``transformers.modeling_utils``."""
    import torch

    from memfit.models.factory import is_factory

    threads = job.run.threads
    if not is_factory(job.model.name) and importlib.util.find_spec("transformers") is not None:
        importlib.import_module("transformers.modeling_utils")

    torch.set_num_threads(threads or DEFAULT_THREADS)
    a = torch.nn.Parameter(torch.ones(256, 256))
    (a @ a).relu().sum().backward()
    torch.optim.AdamW([a]).step()
    torch.nn.functional.softmax(torch.ones(64, 4096), dim=-1)


def target_device(name: str) -> Device:
    """The device of a name; the CPU as far as it has been measured (a calibration here would cost memory)."""
    from memfit import devices
    from memfit.devices import cpu

    if name == "auto":
        from memfit.devices import detect

        return detect.card() or cpu.device(measure=False)
    return cpu.device(measure=False) if name == "cpu" else devices.get_device(name)


def as_message(error: MemfitError) -> dict[str, Any]:
    """An error as it is told to the parent."""
    return {"event": "error", "kind": type(error).__name__, "key": error.key, "figures": error.figures}


def from_message(message: dict[str, Any]) -> MemfitError:
    """The error that :func:`as_message` told of."""
    figures = message["figures"]
    kind = getattr(errors, message["kind"], RunFailed)
    if kind is MissingExtra:
        return MissingExtra(figures["package"], figures["extra"])
    return kind(message["key"], **figures)


def one_line(error: BaseException) -> str:
    """Class and first line of an error's text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def fail_loudly(error: BaseException) -> MemfitError:
    """For the process's edge: an error that nobody foresaw, with its traceback on standard error."""
    import traceback

    traceback.print_exception(error, file=sys.stderr)
    return RunFailed("run.crashed", reason=one_line(error))
