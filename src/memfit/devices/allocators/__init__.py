"""Models of allocators: from a sequence of sizes to what a process holds of its device."""

from __future__ import annotations

from memfit.core.device import Device
from memfit.devices.allocators.cpu import CpuAllocator
from memfit.devices.allocators.cuda import CachingAllocator
from memfit.devices.allocators.space import Allocator, OutOfSpace

__all__ = ["Allocator", "CachingAllocator", "CpuAllocator", "OutOfSpace", "allocator_for"]


def allocator_for(device: Device, capacity: int | None = None) -> Allocator:
    """A fresh model of the allocator that PyTorch uses on ``device``.

    Args:
        device: its kind chooses the model. ROCm builds compile the CUDA allocator's source; torch_npu's is a
            port of it with the same sizes (https://gitee.com/ascend/pytorch, NPUCachingAllocator.cpp).
        capacity: bytes that it may hold; left out: the device's memory less the process's context.
    """
    if capacity is None:
        capacity = device.memory_bytes - device.context_bytes
    return CpuAllocator(capacity) if device.is_cpu else CachingAllocator(capacity)
