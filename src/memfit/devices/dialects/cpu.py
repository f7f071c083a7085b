"""The CPU's dialect. Fake tensors take the math attention where real CPU tensors take the flash kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from memfit.devices.dialects.attention import float_mask, math_attention

aten = torch.ops.aten
_FLASH = 1  # at::SDPBackend::flash_attention


class CpuDialect:
    def attention(self, query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: bool,
                  scale: float | None, enable_gqa: bool) -> Any:  # fmt: skip
        if not self._flash(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
            return math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        mask = float_mask(attn_mask, query.dtype)
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
        )[0]

    @staticmethod
    def _flash(
        query: Any, key: Any, value: Any, mask: Any, dropout_p: float, causal: bool, gqa: bool
    ) -> bool:
        """Asks the local PyTorch, with real tensors of the same shape and strides whose pages are never touched."""

        def like(t: Any) -> Any:
            real = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
            return real.requires_grad_(t.requires_grad) if t.is_floating_point() else real

        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            choice = torch._fused_sdp_choice(
                like(query), like(key), like(value), None if mask is None else like(mask), dropout_p, causal,
                enable_gqa=gqa,
            )  # fmt: skip
        return choice == _FLASH

    def dropout(self, input: Any, p: float, training: bool, inplace: bool) -> Any:
        return torch.dropout_(input, p, training) if inplace else torch.dropout(input, p, training)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=dtype)

    def workspaces(self, training: bool) -> list[int]:
        return []
