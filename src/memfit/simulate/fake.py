"""The simulated world: fake tensors on a fake CPU that stands for the target; the host is a fake ``meta``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.core.device import Device
from memfit.core.step import Batch
from memfit.devices.dialects import Dialect, dialect_for, spoken
from memfit.simulate.recorder import Recorder


class SimulatedWorld:
    """A :class:`memfit.core.step.World` in which nothing is computed."""

    simulated = True

    def __init__(self, target: Device) -> None:
        self.target = target
        self.device = torch.device("cpu")
        self.host = torch.device("cpu") if target.is_cpu else torch.device("meta")
        self.dialect: Dialect = dialect_for(target)
        self.recorder: Recorder | None = None
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        return self.dialect.autocast(dtype)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self.recorder is not None:
            self.recorder.begin_phase(name)
        yield

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Fake mode on, dialect spoken, libraries kept from taking their tracing road."""
        with self.mode, spoken(self.dialect), not_tracing():
            yield


@contextmanager
def not_tracing() -> Iterator[None]:
    """transformers builds masks that a real run skips when it sees fake tensors (``is_tracing``): it is told that
    there are none. What it then asks of their values is answered by the shadows of integer tensors."""
    import sys

    module = sys.modules.get("transformers.utils.import_utils")
    plain = getattr(module, "is_fake_tensor", None)
    if module is None or plain is None:
        yield
        return
    module.is_fake_tensor = lambda x: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.is_fake_tensor = plain  # type: ignore[attr-defined]


def make_fake(model: torch.nn.Module, world: SimulatedWorld) -> None:
    """Turns parameters and buffers (on ``meta``, or real ones of a user's factory) into fake ones, ties kept."""
    memo: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memo:
            detached = tensor.detach()
            new: torch.Tensor
            if detached.device.type == "meta":
                new = world.mode.fake_tensor_converter.from_meta_and_device(
                    world.mode, detached, world.device
                )
            else:
                new = world.mode.from_tensor(detached)
            if isinstance(tensor, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = new
        return memo[id(tensor)]

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = fake(parameter)  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer)


def fake_batch(batch: Batch, world: SimulatedWorld, remember: Any = None) -> Batch:
    """The batch with every real or meta tensor made fake. ``remember(fake, real)`` is told of each real one."""

    def fake(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            from torch._subclasses.fake_tensor import FakeTensor

            if isinstance(value, FakeTensor):
                return value
            if value.device.type == "meta":
                return world.mode.fake_tensor_converter.from_meta_and_device(world.mode, value, world.device)
            new = world.mode.from_tensor(value)
            if remember is not None and not value.is_floating_point():
                remember(new, value)
            return new
        if isinstance(value, dict):
            return {k: fake(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(fake(v) for v in value)
        return value

    return Batch(fake(batch.data), batch.rows, batch.items)
