"""This machine's CPU as a device: its memory limits, and its speeds as calibrated or assumed."""

from __future__ import annotations

import os
import platform

import msgspec

from memfit.core.device import Device
from memfit.core.units import MIB
from memfit.devices import calibration, limits

NO_CALIBRATION = "MEMFIT_NO_CALIBRATION"

# Assumed where nothing was measured: a server core with AVX2 or AVX-512 and its share of memory bandwidth. A
# CPU without AMX or AVX512-bf16 computes bf16 8 to 20 times slower than fp32 (seen with torch 2.13).
_FLOPS_PER_CORE = {"float32": 40e9, "bfloat16": 5e9}
_BANDWIDTH_PER_CORE, _BANDWIDTH_LIMIT = 6e9, 60e9
_CONTEXT_BYTES = 170 * MIB  # measured: 165.4 MiB with torch 2.13 (CPU build) and transformers 5.24
_EFFICIENCY = {
    "matmul": 0.85,
    "bmm": 0.6,
    "attention": 0.5,
    "conv": 0.5,
    "elementwise": 0.4,
    "elementwise_cached": 2.0,
    "in_place": 1.0,
    "reduction": 0.9,
    "transcendental": 0.3,
    "normalisation": 0.35,
    "gather": 0.4,
}


def device(measure: bool = True) -> Device:
    """This machine's CPU.

    Args:
        measure: run the calibration where it has not run yet (skipped without torch, and with
            ``MEMFIT_NO_CALIBRATION=1``); otherwise earlier figures or assumed ones are taken.

    Returns:
        A device whose ``memory_bytes`` is the least of physical memory, control groups and resource limits,
        and whose ``origin`` is ``"measured"`` or ``"assumed"``.
    """
    assumed = _assumed()
    if os.environ.get(NO_CALIBRATION) == "1" or calibration.torch_version() == "none":
        return assumed
    found = calibration.calibrate() if measure else calibration.known()
    if found is None:
        return assumed
    return msgspec.structs.replace(
        assumed,
        bandwidth=found["bandwidth"],
        flops=found["flops"],
        efficiency=found["efficiency"],
        overhead_seconds=found["overhead_seconds"],
        context_bytes=int(found["context_bytes"]),
        sources=(f"calibration on this machine: {calibration.cache_file()}",),
        origin="measured",
    )


def available_bytes() -> int:
    """Bytes that this process could still take now (see :mod:`memfit.devices.limits`)."""
    return limits.available_bytes()


def architecture() -> str:
    """Such as ``"x86-64"`` or ``"aarch64"``."""
    machine = platform.machine().lower()
    return {"x86_64": "x86-64", "amd64": "x86-64", "arm64": "aarch64"}.get(machine, machine)


def _assumed() -> Device:
    cores = calibration.thread_count()
    return Device(
        name="cpu",
        kind="cpu",
        title=calibration.cpu_model(),
        architecture=architecture(),
        memory_bytes=limits.limit_bytes(),
        bandwidth=min(cores * _BANDWIDTH_PER_CORE, _BANDWIDTH_LIMIT),
        flops={dtype: cores * speed for dtype, speed in _FLOPS_PER_CORE.items()},
        context_bytes=_CONTEXT_BYTES,
        overhead_seconds=5e-6,
        efficiency=_EFFICIENCY,
        sources=("memory: /proc/meminfo, control groups, resource limits", "speeds: memfit.devices.cpu"),
    )
