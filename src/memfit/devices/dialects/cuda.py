"""CUDA's dialect, spoken on a machine without a card."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from memfit.core.device import Device
from memfit.devices.dialects.attention import float_mask, math_attention, pad_heads, repeat_groups
from memfit.devices.dialects.cuda_autocast import cuda_autocast

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class CudaDialect:
    """Kernel choice of PyTorch 2.6 and later (``sdp_utils.cpp``: flash before memory-efficient before math)."""

    def __init__(self, device: Device) -> None:
        self.device = device
        digits = "".join(c for c in device.architecture.partition("_")[2] if c.isdigit())
        self.capability = int(digits) if device.architecture.startswith("sm_") and digits else 90

    def attention(self, query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: bool,
                  scale: float | None, enable_gqa: bool) -> Any:  # fmt: skip
        plain_shapes = query.dim() == 4 and query.size(-1) == key.size(-1) and query.size(-2) > 0
        gradient_in_mask = attn_mask is not None and attn_mask.requires_grad
        head = query.size(-1)
        if (
            plain_shapes and attn_mask is None and query.dtype in _HALF and self.capability >= 80 and head <= 256
            and value.size(-1) == head
        ):  # fmt: skip
            (query, key, value), size = pad_heads((query, key, value), 8)
            scale = scale if scale is not None else size**-0.5
            out = aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
            return out[..., :size] if out.size(-1) != size else out
        if plain_shapes and not gradient_in_mask and (query.dtype in _HALF or query.dtype == torch.float32):
            if enable_gqa:
                key, value = repeat_groups(key, value, query.size(-3))
            mask = float_mask(attn_mask, query.dtype)
            if mask is not None:
                mask = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
            saves = torch.is_grad_enabled() and (
                query.requires_grad or key.requires_grad or value.requires_grad
            )
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, saves, dropout_p, is_causal, scale=scale
            )[0]
        return math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def dropout(self, input: Any, p: float, training: bool, inplace: bool) -> Any:
        """CUDA keeps a boolean mask (``native_dropout``), the CPU a scaled one of the input's size."""
        if not training or p == 0.0 or inplace:
            return torch.dropout_(input, p, training) if inplace else torch.dropout(input, p, training)
        return torch.native_dropout(input, p, training)[0]

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        return cuda_autocast(dtype)

    def workspaces(self, training: bool) -> list[int]:
        """cuBLAS: one workspace per handle and stream; backward's thread has a handle of its own.

        Source: PyTorch's ``CUDABlas.cpp`` (``parseChosenWorkspaceSize``): 8,519,680 B before Hopper, 32 MiB on it.
        """
        if self.device.kind != "cuda":
            size = 32 * 2**20
        else:
            size = 32 * 2**20 if self.capability >= 90 else 8_519_680
        return [size] * (2 if training else 1)
