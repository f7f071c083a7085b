"""Dialects: what the target's PyTorch does where fake tensors would take another road than real ones.

A dialect replaces Python functions for the time of a simulation. Functions are replaced rather than intercepted by
a function mode, because such a mode is off inside ``Tensor.backward`` and a recomputation would then take other
kernels than its forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from memfit.core.device import Device


class Dialect(Protocol):
    """What a kind of device says differently."""

    def attention(self, query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: bool,
                  scale: float | None, enable_gqa: bool) -> Any:  # fmt: skip
        """scaled_dot_product_attention by the kernel that the target takes."""
        ...

    def dropout(self, input: Any, p: float, training: bool, inplace: bool) -> Any: ...

    def autocast(self, dtype: Any) -> AbstractContextManager[Any]: ...

    def workspaces(self, training: bool) -> list[int]:
        """Bytes that libraries keep for themselves from the first step on, one entry per block."""
        ...


def dialect_for(device: Device) -> Dialect:
    from memfit.devices.dialects import cpu, cuda

    return cpu.CpuDialect() if device.is_cpu else cuda.CudaDialect(device)


@contextmanager
def spoken(dialect: Dialect) -> Iterator[None]:
    """Speaks a dialect: torch's functions are replaced until the context ends."""
    import torch
    import torch.nn.functional as functional

    plain_attention, plain_dropout = functional.scaled_dot_product_attention, functional.dropout

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
                  is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Any:  # fmt: skip
        if torch.is_autocast_enabled("cpu"):  # on the lower-precision list of both the CPU and CUDA
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (t.to(dtype) for t in (query, key, value))
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)
        with torch.autocast("cpu", enabled=False):  # the cast is made: what runs inside is below autocast
            return dialect.attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return dialect.dropout(input, p, training, inplace)

    functional.scaled_dot_product_attention, functional.dropout = attention, dropout  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain_attention
        functional.dropout = plain_dropout
