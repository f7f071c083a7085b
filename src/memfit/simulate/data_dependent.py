"""Values that only data has, in a world without data. See docs/decisions/0003-data-dependent-steps.md.

Integers and booleans are computed for real, beside the fake tensors, as long as nothing but shapes decides them; a
router's choice is assumed balanced (round robin over the experts); a scalar that is asked for is assumed 1. Each
assumption is written into the Profile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten
LARGEST_SHADOW = 2**22  # elements; beyond it shadows would cost more than the simulation
_CHOOSERS = {
    aten.topk.default,
    aten.sort.default,
    aten.sort.stable,
    aten.argmax.default,
    aten.argsort.default,
}
_WHOLE = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
_SCALARS = {aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default}


def _grouped_mm(args: Any, kwargs: Any) -> Any:
    """(tokens, k) x (experts, k, n) -> (tokens, n); (m, tokens) x (tokens, n) -> (experts, m, n). The library's own
    rule for fake tensors knows bfloat16 only, its CPU kernel every dtype."""
    a, b = args[0], args[1]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    if a.dim() == 2 and b.dim() == 2:
        return a.new_empty((offsets.shape[0], a.shape[0], b.shape[1]))
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


MISSING = {aten._grouped_mm.default: _grouped_mm}


class Shadows:
    """Real values of small integer and boolean tensors, kept beside their fake ones.

    Used as a recorder's ``intercept``.
    """

    def __init__(self) -> None:
        self.values: dict[int, tuple[Any, torch.Tensor]] = {}
        self.assumptions: set[str] = set()

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _SCALARS:
            return self._scalar(func, args)
        if func in MISSING:
            return MISSING[func](args, kwargs)
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            with (
                _disable_current_modes()
            ):  # GradScaler asks whether a gradient overflowed: no, the step is taken
                self.keep(args[1], torch.zeros(args[1].shape))
        if func in (aten.nonzero.default, aten.masked_select.default, aten.unique_consecutive.default) or (
            func is aten.index.Tensor and any(t is not None and t.dtype == torch.bool for t in args[1])
        ):
            return self._sized_by_data(func, args, kwargs)
        out = func(*args, **kwargs)
        self._shadow(func, args, kwargs, out)
        return out

    def _value(self, tensor: Any) -> torch.Tensor | None:
        if not isinstance(tensor, FakeTensor):
            return tensor if isinstance(tensor, torch.Tensor) else None
        found = self.values.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def keep(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Remembers the value of a fake tensor for as long as it lives."""
        import weakref

        self.values[id(fake)] = (weakref.ref(fake), real)

    def _scalar(self, func: Any, args: Any) -> Any:
        tensor = args[0]
        real = self._value(tensor)
        if real is None:
            constant = getattr(tensor, "constant", None)
            real = constant
        if real is not None:
            with _disable_current_modes():
                return bool(real) if func is aten.is_nonzero.default else real.item()
        self.assumptions.add("assumption.scalar")
        if tensor.dtype == torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else 1

    def _real_arguments(self, args: Any) -> Any:
        """The arguments with real tensors, or None where one has no value."""
        if isinstance(args, torch.Tensor):
            return self._value(args)
        if isinstance(args, list | tuple):
            out = [self._real_arguments(a) if isinstance(a, torch.Tensor | list | tuple) else a for a in args]
            missing = any(o is None and a is not None for o, a in zip(out, args, strict=True))
            return None if missing else type(args)(out)
        return args

    def _shadow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        outputs = out if isinstance(out, list | tuple) else (out,)
        if not any(isinstance(o, FakeTensor) and o.dtype in _WHOLE for o in outputs):
            return
        wanted = [o for o in outputs if isinstance(o, FakeTensor) and o.dtype in _WHOLE and o.numel() <= LARGEST_SHADOW]  # fmt: skip
        if not wanted:
            return
        real = self._real_arguments(args)
        if real is not None:
            with _disable_current_modes():
                computed = func(*real, **{k: v for k, v in kwargs.items() if k != "device"})
            computed = computed if isinstance(computed, list | tuple) else (computed,)
            for fake, value in zip(outputs, computed, strict=True):
                if isinstance(fake, FakeTensor) and not fake.is_floating_point():
                    self.keep(fake, value)
        elif func in _CHOOSERS:
            for fake in wanted:
                self.keep(fake, self._balanced(func, args, fake))
            self.assumptions.add("assumption.balanced")

    @staticmethod
    def _balanced(func: Any, args: Any, fake: torch.Tensor) -> torch.Tensor:
        source = args[0]
        dim = args[2] if func is aten.topk.default and len(args) > 2 else args[1] if len(args) > 1 and func is not (
            aten.topk.default) and isinstance(args[1], int) else -1  # fmt: skip
        classes = source.shape[dim] if source.dim() else 1
        with _disable_current_modes():
            return (torch.arange(fake.numel()) % max(classes, 1)).reshape(fake.shape)

    def _sized_by_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten.index.Tensor:
            masks = [self._value(t) if t is not None else None for t in args[1]]
            with _disable_current_modes():
                places: list[Any] = []
                for given, mask in zip(args[1], masks, strict=True):
                    if given is None:
                        places.append(None)
                    elif given.dtype == torch.bool:
                        chosen = mask if mask is not None else torch.ones(given.shape, dtype=torch.bool)
                        places.extend(chosen.nonzero().unbind(1))
                    else:
                        places.append(given)
            return func(args[0], places)
        real = self._value(args[0])
        if func is aten.nonzero.default:
            with _disable_current_modes():
                value = (real if real is not None else torch.ones(args[0].shape, dtype=torch.bool)).nonzero()
            if real is None:
                self.assumptions.add("assumption.nonzero")
            fake = aten.new_empty.default(args[0], list(value.shape), dtype=torch.int64)
            self.keep(fake, value)
            return fake
        return NotImplemented
