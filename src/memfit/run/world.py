"""The real world: tensors hold numbers, on this machine's card or its CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from memfit.core.device import Device

if TYPE_CHECKING:
    from memfit.simulate.recorder import Recorder


class RealWorld:
    """A :class:`memfit.core.step.World` in which the step is really computed.

    Attributes:
        device: the card if the target is one and torch can use it, else the CPU.
        host: the CPU.
        recorder: told of phases while one is attached.
        phase_name: the phase that runs now or ran last: what an out-of-memory error happened in.
        marks: (phase, seconds) at each beginning of a phase while a recorder is attached.
    """

    simulated = False

    def __init__(self, target: Device) -> None:
        self.target = target
        on_card = target.kind in ("cuda", "rocm") and torch.cuda.is_available()
        self.device = torch.device("cuda" if on_card else "cpu")
        self.host = torch.device("cpu")
        self.recorder: Recorder | None = None
        self.phase_name = "load"
        self.marks: list[tuple[str, float]] = []

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phase_name = name
        if self.recorder is not None:
            self.recorder.begin_phase(name)
            self.synchronize()
            self.marks.append((name, time.perf_counter()))
        yield

    def synchronize(self) -> None:
        """Waits for what a card still computes, so that the clock can be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
