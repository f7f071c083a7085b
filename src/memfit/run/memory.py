"""What a process really holds: the kernel's counters, a hard limit, and telling out-of-memory errors apart.

Linux. A torch tensor on the CPU is anonymous memory; library code and mapped files are not. The peak that the
kernel keeps (``VmHWM``) counts both, so the file pages that are resident now are taken off it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memfit.core.errors import RunFailed
from memfit.core.units import MIB
from memfit.devices.allocators.cpu import MALLOC_SETTINGS
from memfit.devices.limits import process_status

_CLEAR_REFS = Path("/proc/self/clear_refs")
RECORDER_BYTES = 64 * MIB
_CPU_ALLOCATOR = ("DefaultCPUAllocator", "bad_alloc", "not enough memory: you tried to allocate")


def child_environment(threads: int | None = None) -> dict[str, str]:
    """The environment of a process whose memory is measured: ours, with malloc's settings that make it
    repeatable (see :mod:`memfit.devices.allocators.cpu`), and the number of threads that torch and BLAS
    start."""
    environment = {**os.environ, **MALLOC_SETTINGS}
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return environment


def anonymous_bytes() -> int:
    """Anonymous memory that this process holds now."""
    return process_status().get("RssAnon", 0)


def peak_anonymous_bytes() -> int:
    """The most anonymous memory since the start or the last :func:`reset_peak`."""
    status = process_status()
    files = status.get("RssFile", 0) + status.get("RssShmem", 0)
    return max(status.get("VmHWM", 0) - files, status.get("RssAnon", 0))


def reset_peak() -> bool:
    """Starts the kernel's peak again from what is held now; False where the kernel does not let us."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def tidy() -> None:
    """Gives back what is free: Python's garbage, and the pages of malloc's heap that hold nothing."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


@contextmanager
def hard_limit(budget_bytes: int) -> Iterator[None]:
    """Holds this process to ``budget_bytes`` of anonymous memory: the operating system refuses what goes
    beyond.

    ``RLIMIT_DATA`` counts private writable address space (``VmData``), of which a part is never touched
    (stacks, libraries' data): the limit is what is mapped now plus what the budget leaves. The soft limit is
    put back afterwards; the hard one is never changed.

    Raises:
        RunFailed: the process holds more than the budget already.
    """
    status = process_status()
    held = status.get("RssAnon", 0)
    if held >= budget_bytes:
        raise RunFailed("run.budget_below_start", held=held, budget=budget_bytes)
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = status.get("VmData", 0) + budget_bytes - held
    if before != resource.RLIM_INFINITY:
        wanted = min(wanted, before)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


@contextmanager
def room_for_recorder() -> Iterator[None]:
    """Raises a hard limit by what following each storage of a step may take: it is no part of the job."""
    soft, most = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY:
        yield
        return
    wanted = soft + RECORDER_BYTES
    resource.setrlimit(
        resource.RLIMIT_DATA, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, most))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was refused. torch's CPU allocator has no error class of its own: it
    raises ``RuntimeError`` (https://github.com/pytorch/pytorch/blob/main/c10/core/impl/alloc_cpu.cpp). An
    error that was raised ``from`` such a one counts too."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, RuntimeError) and any(mark in str(error) for mark in _CPU_ALLOCATOR):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def drop_frames(error: BaseException | None) -> None:
    """Lets go of everything that an error's frames hold (activations, the graph), along its chain of
    causes."""
    while error is not None:
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
        error = error.__cause__ or error.__context__
