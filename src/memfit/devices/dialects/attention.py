"""scaled_dot_product_attention's kernels, called one by one, and the math road that all share.

Source of the order and of the checks: PyTorch's ``aten/src/ATen/native/transformers/attention.cpp`` and
``sdp_utils.cpp`` (CUDA), ``sdp_utils_cpp.cpp`` (CPU).
"""

from __future__ import annotations

import math
from typing import Any

import torch

aten = torch.ops.aten


def float_mask(mask: Any, dtype: torch.dtype) -> Any:
    """Boolean masks become additive ones in the query's dtype, as ``convert_boolean_attn_mask`` does."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), -math.inf, dtype=dtype))


def repeat_groups(key: Any, value: Any, heads: int) -> tuple[Any, Any]:
    """Grouped-query heads made as many as the query's (copies, as the library does where a kernel cannot)."""
    if key.size(-3) == heads:
        return key, value
    return key.repeat_interleave(heads // key.size(-3), -3), value.repeat_interleave(
        heads // value.size(-3), -3
    )


def math_attention(query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool,
                   scale: float | None, enable_gqa: bool) -> Any:  # fmt: skip
    """The composite road: scores, softmax and dropout as ordinary operators."""
    out = aten._scaled_dot_product_attention_math(
        query,
        key,
        value,
        float_mask(mask, query.dtype),
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return out[0]


def pad_heads(tensors: tuple[Any, ...], multiple: int) -> tuple[tuple[Any, ...], int]:
    """Head size padded to a multiple, as ``pad_last_dim`` does; returns the tensors and the original size."""
    size = tensors[0].size(-1)
    rest = size % multiple
    if rest == 0:
        return tensors, size
    return tuple(torch.nn.functional.pad(t, (0, multiple - rest)) for t in tensors), size
