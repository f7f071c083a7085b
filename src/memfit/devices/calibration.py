"""Measure this machine's CPU once, in a child process, and keep the figures.

The child runs with the malloc settings under which memfit measures and runs jobs
(:data:`memfit.devices.allocators.cpu.MALLOC_SETTINGS`): there each large output is a fresh mapping whose
pages fault in on first touch, which takes much of the speed of elementwise work.

Figures from a busy machine are too low by factors (with one of two cores taken: 2
for matmuls, 10 for reductions). They are used until the machine is quiet; then the next use measures
again, once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from memfit.core.errors import MissingExtra, RunFailed
from memfit.devices.allocators.cpu import MALLOC_SETTINGS

VERSION = 1
"""Raised when the meaning of a figure changes; older files are then measured again."""

TYPICAL_SECONDS = 10.0
_LONGEST_SECONDS = 120.0


def is_calibrated() -> bool:
    """Whether figures for this CPU, torch version and thread count are at hand."""
    return torch_version() != "none" and known() is not None


def calibrate(force: bool = False) -> dict[str, Any]:
    """The figures of this machine, measured now where there are none yet.

    Returns:
        ``flops`` (FLOP/s by dtype, the fastest matmul), ``bandwidth`` (bytes read and written per second by
        an elementwise operation that allocates nothing), ``efficiency`` (class speed / ``flops["float32"]``
        for matmul, bmm, attention and conv, else / ``bandwidth``; it exceeds 1 where a class works in
        cache), ``overhead_seconds`` (per operator), ``context_bytes`` (anonymous memory of a process that
        imported torch and transformers), ``load`` (the machine's load average at the start), ``key``.

    Raises:
        MissingExtra: torch is not installed.
        RunFailed: the child failed or took more than two minutes.
    """
    if torch_version() == "none":
        raise MissingExtra("torch", "torch")
    found = None if force else known()
    if found is None or (_was_busy(found) and not _is_busy()):
        found = {**_measure_in_child(), "key": _key()}
        _write(found)
    return found


def cache_file() -> Path:
    """Where the figures are kept: ``$XDG_CACHE_HOME/memfit/cpu-<key>.json``, by default in ``~/.cache``."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memfit"
    key = _key()
    words = re.findall(r"[a-z0-9.]+", f"{key['cpu']} torch {key['torch']} threads {key['threads']}".lower())
    return folder / f"cpu-{'-'.join(words)}.json"


@cache
def cpu_model() -> str:
    """The CPU's name as the kernel shows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.processor() or platform.machine()


def thread_count() -> int:
    """Threads that torch will use: ``OMP_NUM_THREADS``, else the cores open to this process."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def torch_version() -> str:
    """The installed torch's version, read from its files: importing torch takes more than a second."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "none"
    text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    match = re.search(r"__version__ = ['\"]([^'\"]+)", text)
    return match[1] if match else "unknown"


def _key() -> dict[str, Any]:
    return {
        "version": VERSION,
        "cpu": cpu_model(),
        "torch": torch_version(),
        "threads": thread_count(),
    }


def _was_busy(found: dict[str, Any]) -> bool:
    """Whether other processes took more than half a core while ``found`` was measured."""
    return float(found.get("load", 0.0)) > 0.5


def _is_busy() -> bool:
    return os.getloadavg()[0] > 0.5


def known() -> dict[str, Any] | None:
    """The figures measured earlier for this key; measures nothing."""
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or cut short: measured again
        return None
    return found if isinstance(found, dict) and found.get("key") == _key() else None


def _write(found: dict[str, Any]) -> None:
    import tempfile

    file = cache_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may calibrate at once: each writes a file of its own and the last one stays, whole.
    with tempfile.NamedTemporaryFile(
        "w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8"
    ) as out:
        json.dump(found, out, indent=1)
    Path(out.name).replace(file)


def _measure_in_child() -> dict[str, Any]:
    import subprocess

    environment = {
        **os.environ,
        **MALLOC_SETTINGS,
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
    }
    try:
        child = subprocess.run(
            [sys.executable, "-m", "memfit.devices.benchmark"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LONGEST_SECONDS,
            check=True,
        )
        found = json.loads(child.stdout)
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or [f"exit status {error.returncode}"]
        raise RunFailed("device.calibration_failed", reason=last[0]) from error
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise RunFailed("device.calibration_failed", reason=str(error)) from error
    assert isinstance(found, dict)
    return found
