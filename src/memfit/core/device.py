"""A device as a noun: what it holds, how fast it is, how it behaves. Data comes from ``devices/``."""

from __future__ import annotations

import msgspec


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator, or this machine's CPU.

    Attributes:
        name: the catalogue's name, such as ``"rtx-4090"``.
        kind: the family whose dialect and allocator apply.
        architecture: such as ``"sm_90"``, ``"gfx942"``, ``"ascend-910b"``, ``"x86-64"``.
        memory_bytes: capacity as the driver reports it to a program.
        bandwidth: of device memory, bytes per second.
        flops: dense FLOP/s without sparsity by dtype (``"float32"``, ``"tf32"``, ``"bfloat16"``, ``"float16"``).
        host_link: bytes per second in one direction between host and device; 0 on the CPU.
        multiprocessors: streaming multiprocessors (compute units); 0 where it means nothing.
        context_bytes: what a process holds before its first tensor (context, libraries, interpreter).
        overhead_seconds: per operator (kernel launch, dispatcher).
        sources: where the figures come from.
        efficiency: measured / peak by op class, where a calibration has run; else the catalogue's assumption.
    """

    name: str
    kind: str
    architecture: str
    memory_bytes: int
    bandwidth: float
    flops: dict[str, float]
    host_link: float = 0.0
    multiprocessors: int = 0
    context_bytes: int = 0
    overhead_seconds: float = 5e-6
    title: str = ""
    vendor: str = ""
    efficiency: dict[str, float] = {}
    sources: tuple[str, ...] = ()
    origin: str = "assumed"

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    def flops_for(self, dtype: str) -> float:
        """Dense FLOP/s for a dtype; a missing dtype runs at float32's speed."""
        return self.flops.get(dtype) or self.flops["float32"]
