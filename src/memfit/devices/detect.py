"""Which device this machine has: its CUDA or ROCm card as torch sees it, else its CPU."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import msgspec

from memfit.core.device import Device
from memfit.devices import shelf

# Where a driver of NVIDIA, of NVIDIA under WSL, or of AMD shows itself. Without one, torch need not be asked:
# importing it takes more than a second.
_DRIVERS = ("dev/nvidiactl", "dev/dxg", "dev/kfd")
_WORDS_WITHOUT_MEANING = {"nvidia", "amd", "geforce", "tesla", "instinct", "graphics", "device"}


def card() -> Device | None:
    """The first CUDA (or ROCm) device that torch can use, with the memory that its driver reports."""
    if not may_have_card() or importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    return from_properties(torch.cuda.get_device_properties(0), rocm=torch.version.hip is not None)


def may_have_card(root: Path = Path("/")) -> bool:
    """Whether a driver is present that torch's CUDA or ROCm build could use."""
    return any((root / path).exists() for path in _DRIVERS)


def from_properties(properties: Any, rocm: bool = False) -> Device:
    """A Device from ``torch.cuda.get_device_properties``: the catalogue's speeds, the driver's memory.

    A card that the catalogue does not know takes the speeds of the known one nearest in architecture and in
    multiprocessors, scaled by the latter; its origin stays ``"assumed"``.
    """
    kind = "rocm" if rocm else "cuda"
    architecture = (
        properties.gcnArchName.split(":")[0] if rocm else f"sm_{properties.major}{properties.minor}"
    )
    count = int(properties.multi_processor_count)
    known = catalogue_name(properties.name, int(properties.total_memory))
    if known is not None:
        device = shelf.devices()[known]
        scale = 1.0
    else:
        device = min(
            (d for d in shelf.devices().values() if d.kind == kind),
            key=lambda d: (d.architecture != architecture, abs(d.multiprocessors - count)),
        )
        scale = count / device.multiprocessors
    return msgspec.structs.replace(
        device,
        name=known or slug(properties.name),
        title=properties.name,
        architecture=architecture,
        memory_bytes=int(properties.total_memory),
        multiprocessors=count,
        bandwidth=device.bandwidth * scale,
        flops={dtype: speed * scale for dtype, speed in device.flops.items()},
        sources=(*device.sources, "memory, multiprocessors: torch.cuda.get_device_properties"),
    )


def slug(title: str) -> str:
    """A driver's name as catalogue names are written: ``"NVIDIA GeForce RTX 4090"`` -> ``"rtx-4090"``."""
    words = re.findall(r"[a-z0-9]+", title.lower())
    return "-".join(w for w in words if w not in _WORDS_WITHOUT_MEANING)


def catalogue_name(title: str, memory_bytes: int) -> str | None:
    """The catalogue's name for a driver's name; among several sizes the one with that memory (within 5 %)."""
    name = slug(title)
    candidates = [
        known
        for known, entry in shelf.entries().items()
        if name == known or name in entry.aliases or name.startswith(f"{known}-")
    ]
    near = [
        c for c in candidates if abs(shelf.devices()[c].memory_bytes - memory_bytes) <= 0.05 * memory_bytes
    ]
    return max(near, key=len, default=None)
