"""Seconds per operator: a roofline. The larger of arithmetic and traffic, plus what one dispatch costs.

FLOP counts are PyTorch's own (``torch.utils.flop_counter``); bytes are those of the operator's inputs and outputs.
How much of the peak an operator class reaches is the device's ``efficiency`` (measured by a calibration, or the
catalogue's assumption).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from memfit.core.device import Device

aten = torch.ops.aten
_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float32",
}
#: Share of a peak that an operator class reaches where nothing has been measured.
ASSUMED = {
    "matmul": 0.7, "bmm": 0.5, "attention": 0.5, "conv": 0.5, "elementwise": 0.8, "reduction": 0.7,
    "transcendental": 0.6, "normalisation": 0.6, "gather": 0.4,
}  # fmt: skip
_CLASSES = {
    "matmul": ("mm", "addmm", "linear", "_grouped_mm"),
    "bmm": ("bmm", "baddbmm"),
    "attention": ("attention",),
    "conv": ("convolution",),
    "transcendental": ("exp", "softmax", "gelu", "silu", "sigmoid", "tanh", "log", "erf", "pow", "sqrt", "sin", "cos",
                       "dropout", "bernoulli"),
    "normalisation": ("norm",),
    "gather": ("embedding", "index", "gather", "scatter", "nll_loss"),
    "reduction": ("sum", "mean", "amax", "max", "any", "argmax"),
}  # fmt: skip


def op_class(name: str) -> str:
    """The class of an operator by its name (``mm.default`` -> matmul, …)."""
    base = name.partition(".")[0].strip("_")
    if base in _CLASSES["matmul"]:
        return "matmul"
    if base in _CLASSES["bmm"]:
        return "bmm"
    for kind in ("attention", "conv", "normalisation", "transcendental", "gather"):
        if any(word in base for word in _CLASSES[kind]):
            return kind
    return "reduction" if base in _CLASSES["reduction"] else "elementwise"


def roofline(device: Device) -> Callable[..., float]:
    """(func, args, kwargs, out) -> seconds on a device."""
    share = {**ASSUMED, **device.efficiency}
    classes: dict[Any, tuple[str, bool, Any]] = {}

    def cost(func: Any, args: Any, kwargs: Any, out: Any) -> float:
        found = classes.get(func)
        if found is None:
            moves = not (func.is_view or func in _FREE)
            found = classes[func] = (op_class(func.__name__), moves, flop_registry.get(func.overloadpacket))
        kind, moves, flops_of = found
        if not moves:
            return device.overhead_seconds * 0.5
        moved, dtype = _bytes(args, out)
        seconds = moved / (device.bandwidth * share.get(kind, 0.5)) if kind not in _ARITHMETIC else (
            moved / device.bandwidth)  # fmt: skip
        if flops_of is not None:
            flops = flops_of(*args, **kwargs, out_val=out)
            peak = (
                device.flops_for(_DTYPES.get(dtype, "float32"))
                if dtype is not None
                else device.flops["float32"]
            )
            seconds = max(seconds, flops / (peak * share[kind if kind in _ARITHMETIC else "matmul"]))
        return seconds + device.overhead_seconds

    return cost


_ARITHMETIC = ("matmul", "bmm", "attention", "conv")
_FREE = {aten.detach.default, aten.alias.default, aten.empty.memory_format, aten.empty_strided.default,
         aten.empty_like.default, aten.lift_fresh.default, aten._unsafe_view.default}  # fmt: skip


def _bytes(args: Any, out: Any) -> tuple[int, torch.dtype | None]:
    moved = 0
    dtype: torch.dtype | None = None
    for value in (*args, out):
        if isinstance(value, torch.Tensor):
            moved += value.numel() * value.element_size()
            if dtype is None and value.is_floating_point():
                dtype = value.dtype
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, torch.Tensor):
                    moved += item.numel() * item.element_size()
    return moved, dtype
