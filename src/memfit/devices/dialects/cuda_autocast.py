"""CUDA's autocast lists on simulated tensors.

The simulated device is a fake CPU, whose autocast has lists of its own. For the time of the context every operator
of CUDA's lists gets a kernel on the AutocastCPU key that does what ``torch/csrc``'s autocast does for CUDA
(``aten/src/ATen/autocast_mode.h``: AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE,
AT_FORALL_PROMOTE), weight-cast cache included: a leaf's cast is made once and lives until the outermost context ends.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

LOWER = [
    "_convolution.deprecated",
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "scaled_dot_product_attention",
]
FLOAT32 = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
]
FLOAT32_BY_DTYPE = [
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "sum",
    "sum.dim_IntList",
]
PROMOTE = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
    "cat",
    "stack",
]

_state: dict[str, Any] = {"depth": 0, "cache": {}}


def _tree(function: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_tree(function, v) for v in value)
    return value


def _eligible(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """``cached_cast``: leaves that train and are float32 are cast once per outermost context."""
    if not _eligible(tensor) or tensor.dtype == dtype:
        return tensor
    half = dtype in (torch.float16, torch.bfloat16)
    cacheable = (
        half and tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf
        and not tensor._is_view() and torch.is_autocast_cache_enabled()
    )  # fmt: skip
    if not cacheable:
        return tensor.to(dtype)
    found = _state["cache"].get(id(tensor))
    if found is None:
        found = (tensor, tensor.to(dtype))
        _state["cache"][id(tensor)] = found
    return found[1]


def _widest(values: Any) -> torch.dtype:
    found: list[torch.dtype] = []
    _tree(lambda t: found.append(t.dtype) if _eligible(t) else None, values)
    return torch.float32 if torch.float32 in found else (found[0] if found else torch.float32)


def _kernel(overload: Any, policy: str, *args: Any, **kwargs: Any) -> Any:
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(key):
        if policy == "lower":
            cast = functools.partial(_cast, torch.get_autocast_dtype("cpu"))
        elif policy == "promote":
            cast = functools.partial(_cast, _widest(args))
        elif policy == "dtype":
            places = [a.name for a in overload._schema.arguments]
            given = len(args) > places.index("dtype") if "dtype" in places else True
            floats = any(isinstance(a, torch.Tensor) and _eligible(a) for a in args)
            if not given and kwargs.get("dtype") is None and floats:
                kwargs["dtype"] = torch.float32
            return overload(*args, **kwargs)
        else:
            cast = functools.partial(_cast, torch.float32)
        return overload(*_tree(cast, args), **{k: _tree(cast, v) for k, v in kwargs.items()})


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return None if packet is None else getattr(packet, overload or "default", None)


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """``torch.autocast("cuda", dtype)`` for fake CPU tensors."""
    library = None
    if _state["depth"] == 0:
        library = torch.library.Library("aten", "IMPL", "AutocastCPU")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for policy, names in (
                ("lower", LOWER),
                ("float32", FLOAT32),
                ("dtype", FLOAT32_BY_DTYPE),
                ("promote", PROMOTE),
            ):
                for name in names:
                    overload = _overload(name)
                    if overload is not None:
                        library.impl(
                            name,
                            functools.partial(_kernel, overload, policy),
                            "AutocastCPU",
                            allow_override=True,
                        )
    _state["depth"] += 1
    try:
        with torch.autocast("cpu", dtype=dtype):
            yield
    finally:
        _state["depth"] -= 1
        if _state["depth"] == 0:
            _state["cache"].clear()
        if library is not None:
            library._destroy()
