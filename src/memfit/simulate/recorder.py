"""Follows every storage from birth to death while a step runs, on fake tensors or on real ones.

The same recorder predicts and measures, so that nothing can differ between the two but the step itself. It is a
dispatch mode: it sees each operator below autograd. A mode changes a few things in autograd's engine (it takes
out-of-place operators where the plain run works in place); :func:`in_place_instead` undoes them.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_NO_SEQUENCE = 2**64 - 1  # AccumulateGrad nodes carry this instead of a number
ALLOC, FREE, PHASE = 0, 1, 2


class Record:
    """One storage. ``kind`` is empty until someone tags it or :meth:`Recorder.classify` decides."""

    __slots__ = ("born_grad", "died_backward", "kind", "number", "op", "path", "phase", "place", "size")

    def __init__(
        self, number: int, size: int, path: str, op: str, phase: str, place: str, grad: bool
    ) -> None:
        self.number, self.size, self.path, self.op, self.phase, self.place = (
            number,
            size,
            path,
            op,
            phase,
            place,
        )
        self.kind = ""
        self.born_grad = grad
        self.died_backward = False


class Recorder(TorchDispatchMode):
    """Records allocations, frees and phases as a list of events.

    Events are tuples: ``(ALLOC, number, path)``, ``(FREE, number, path)``, ``(PHASE, name, "")``; ``path`` is the
    module in whose name it happened ("" outside of all). ``records[number]`` says the rest.

    Args:
        model: whose modules name the paths.
        blocks: paths of repeated modules; code between two of them counts to the former.
        device: where the step runs; tensors elsewhere are host tensors.
        cost: ``(func, args, kwargs, out) -> seconds`` or None; summed per phase and path in ``seconds``.
        intercept: asked before each operator; returns ``NotImplemented`` to let it run.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        blocks: tuple[str, ...],
        device: torch.device,
        cost: Callable[..., float] | None = None,
        intercept: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.device_type = device.type
        self.cost = cost
        self.intercept = intercept
        self.records: list[Record] = []
        self.events: list[tuple[int, Any, str]] = []
        self.seconds: dict[tuple[int, str], float] = {}
        self.phase_name = "load"
        self.phase_count = 0
        self._live: dict[int, tuple[Record, weakref.ref[Any]]] = {}
        self._blocks = set(blocks)
        self._stack: list[str] = []
        self._sticky: str | None = None
        self._sequence: list[int] = [0]
        self._sequence_paths: list[str] = [""]
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._parameter_paths = {id(p): path.rpartition(".")[0] for path, p in model.named_parameters()}
        self._hooks: list[Any] = []
        self._last_free_path = ""

    # -- context ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        register = torch.nn.modules.module
        self._hooks = [
            register.register_module_forward_pre_hook(self._enter_module),
            register.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        path = self._paths.get(id(module))
        if path is not None:
            self._stack.append(path)
            self._sticky = None
            self._mark_sequence()

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        path = self._paths.get(id(module))
        if path is not None and self._stack:
            self._stack.pop()
            self._sticky = path if path in self._blocks else None
            self._mark_sequence()

    def _mark_sequence(self) -> None:
        path = self.path()
        if self._sequence_paths[-1] != path:
            self._sequence.append(torch._C._autograd._get_sequence_nr())
            self._sequence_paths.append(path)

    def path(self) -> str:
        """The module in whose name code runs now."""
        if self._stack:
            return self._sticky or self._stack[-1]
        node = torch._C._current_autograd_node()
        if node is not None:
            return self._node_path(node)
        return self._sticky or ""

    def _node_path(self, node: Any) -> str:
        number = node._sequence_nr()
        if number == _NO_SEQUENCE:
            variable = getattr(node, "variable", None)
            return self._parameter_paths.get(id(variable), "")
        return self._sequence_paths[bisect_right(self._sequence, number) - 1]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Opens a phase; a new one begins even if the name is the last one's."""
        self.begin_phase(name)
        yield

    def begin_phase(self, name: str) -> None:
        self.phase_name = name
        self.phase_count += 1
        self._sticky = None
        self.events.append((PHASE, name, ""))

    # -- storages --------------------------------------------------------------------------------------------

    def track(self, tensor: torch.Tensor, kind: str, path: str = "") -> None:
        """Counts a tensor that exists already, or tags one that is known."""
        record = self._see(tensor, path, "")
        if record is not None:
            record.kind = kind
            if path:
                record.path = path

    def record_of(self, tensor: torch.Tensor) -> Record | None:
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[0]

    def _see(self, tensor: torch.Tensor, path: str, op: str) -> Record | None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        entry = self._live.get(key)
        if entry is not None:
            return entry[0]
        size = storage.nbytes()
        device = getattr(tensor, "fake_device", None) or tensor.device
        place = "device" if device.type == self.device_type else "host"
        record = Record(len(self.records), size, path, op, self.phase_name, place, torch.is_grad_enabled())
        self.records.append(record)
        self.events.append((ALLOC, record.number, path))
        self._live[key] = (record, weakref.ref(storage, partial(self._dead, key)))
        return record

    def _dead(self, key: int, _: Any) -> None:
        self._free(key)

    def _free(self, key: int) -> None:
        entry = self._live.pop(key, None)
        if entry is None:
            return
        record = entry[0]
        if not self._stack and self.phase_name == "backward" and not torch.is_grad_enabled():
            record.died_backward = True
        path = self.path()
        self.events.append((FREE, record.number, path))

    # -- operators -------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is torch.ops.prim.device.default
        ):  # asked thousands of times; a fake tensor knows without dispatch
            return getattr(args[0], "fake_device", None) or func(*args, **kwargs)
        taken = (in_place_instead(func, args) if self.phase_name == "backward" else None) or func
        out = NotImplemented if self.intercept is None else self.intercept(taken, args, kwargs)
        if out is NotImplemented:
            out = taken(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            if out.untyped_storage()._cdata not in self._live:
                self._see(out, self.path() or self._owner(args), func.__name__)
        elif isinstance(out, list | tuple):
            self._see_many(out, func, args)
        if self.cost is not None:
            key = (self.phase_count, self.path() or self._owner(args))
            self.seconds[key] = self.seconds.get(key, 0.0) + self.cost(func, args, kwargs, out)
        return out

    def _see_many(self, out: Any, func: Any, args: Any) -> None:
        path = self.path()
        lists = args[0] if args and isinstance(args[0], list | tuple) and len(args[0]) == len(out) else None
        for number, item in enumerate(out):
            if isinstance(item, torch.Tensor):
                owner = path
                if not owner and lists is not None and isinstance(lists[number], torch.Tensor):
                    owner = self._owner((lists[number],))
                self._see(item, owner or self._owner(args), func.__name__)

    def _owner(self, args: Any) -> str:
        """Outside of all modules (the optimizer): the path of the first tensor among the arguments."""
        for arg in args:
            if isinstance(arg, torch.Tensor):
                record = self.record_of(arg)
                return record.path if record is not None else ""
        return ""

    # -- afterwards ------------------------------------------------------------------------------------------

    def classify(self) -> None:
        """Names what nobody has tagged: saved for backward, or temporary."""
        for record in self.records:
            if not record.kind:
                saved = record.born_grad and record.died_backward and record.phase != "optimizer"
                record.kind = "activations" if saved else "temporaries"


def in_place_instead(func: Any, args: Any) -> Any:
    """The operator that the engine takes when no dispatch mode is active, or None for the same one.

    Sources: PyTorch's ``torch/csrc/autograd/input_buffer.cpp`` (accumulation into a buffer that nobody else holds)
    and ``FunctionsManual.cpp`` (``index_backward`` and others ask ``areAnyTensorSubclassLike``, which is true under
    a mode). Only inside C++ nodes: a user's own backward and a recomputation run as written.
    """
    if func not in _OUT_OF_PLACE or torch.is_grad_enabled():
        return None
    node = torch._C._current_autograd_node()
    if node is None or isinstance(node, torch.autograd.function.BackwardCFunction):
        return None
    target = args[0]
    if func is aten.add.Tensor:
        other = args[1]
        if not isinstance(other, torch.Tensor) or target.shape != other.shape or target.dtype != other.dtype:
            return None
        # Two references are the engine's and Python's own; a storage held twice is Python's and the tensor's.
        alone = target._use_count() <= 4 and torch._C._storage_Use_Count(target.untyped_storage()._cdata) <= 2
        if not alone or not is_non_overlapping_and_dense_or_false(target):
            return None
    return _OUT_OF_PLACE[func]


_OUT_OF_PLACE = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.index_put.default: aten.index_put_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.index_add.default: aten.index_add_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}
