"""What the process holds during a run, without what measuring itself costs."""

from __future__ import annotations

import torch

from memfit.core.words import say
from memfit.run.memory import anonymous_bytes, peak_anonymous_bytes, reset_peak, tidy
from memfit.run.world import RealWorld


class Meter:
    """Peaks and seconds of plain steps. On a CPU the kernel's counter of anonymous memory; on a card its
    allocator's.

    Attributes:
        seconds: of each step that ran without the recorder.
        card_process_bytes: what a card's driver showed at the recorded step.
        notes: what had to be assumed.
    """

    def __init__(self, world: RealWorld) -> None:
        self._on_card = world.device.type == "cuda"
        self._device = world.device
        self._plain = self._whole = 0
        self.seconds: list[float] = []
        self.card_process_bytes = 0
        self.notes: list[str] = []

    def begin(self) -> None:
        """Steps begin now: building and loading are over."""
        self._reset()
        if not self._on_card and not reset_peak():
            self.notes.append(say("run.peak_unreset"))

    def pause(self) -> None:
        """Before a recorded step."""
        self._plain = max(self._plain, self._now())
        self._whole = max(self._whole, self._plain)

    def go_on(self) -> None:
        """After one."""
        self._whole = max(self._whole, self._now())
        self._reset()

    def held_bytes(self) -> int:
        """Now."""
        return torch.cuda.memory_allocated(self._device) if self._on_card else anonymous_bytes()

    def peak_bytes(self) -> int:
        """Since the first step, recorded ones included."""
        return max(self._whole, self._now())

    def process_bytes(self) -> int:
        """The peak of plain steps and of saving."""
        if self._on_card:
            return self.card_process_bytes
        return max(self._plain, self._now())

    def _now(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._on_card else peak_anonymous_bytes()

    def _reset(self) -> None:
        tidy()
        if not self._on_card:
            reset_peak()
