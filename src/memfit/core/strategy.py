"""What a strategy is. Each lives in one file of ``strategies/``; nothing else in the code names one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec

from memfit.core.device import Device
from memfit.core.job import Job
from memfit.core.step import Step, World

Stage = Literal["load", "model", "step", "optimizer", "data", "process"]
STAGES: tuple[Stage, ...] = ("load", "model", "step", "optimizer", "data", "process")
Fidelity = Literal["exact", "lossy"]


@dataclass(frozen=True)
class Situation:
    """What a strategy may look at when it says which settings are worth trying."""

    job: Job
    device: Device
    capabilities: frozenset[str]
    blocks: int
    classes: int
    rows: int
    items_per_row: int


class Strategy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A memory strategy; its fields are its options.

    Class attributes:
        name: on the command line and in the job file (the file's name with hyphens).
        stage: when it is applied; stages run in the order of ``STAGES``.
        targets: the kinds of memory (see ``profile.KINDS``) that it is chosen for.
        needs, excludes, gives: capabilities of a Step, never other strategies' names.
        bound: for a lossy strategy, the largest relative change of a step's loss that it promises.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage]
    targets: ClassVar[tuple[str, ...]]
    needs: ClassVar[frozenset[str]] = frozenset()
    excludes: ClassVar[frozenset[str]] = frozenset()
    gives: ClassVar[frozenset[str]] = frozenset()
    bound: ClassVar[float] = 0.0

    @property
    def fidelity(self) -> Fidelity:
        return "exact"

    @classmethod
    def worth_trying(cls, situation: Situation) -> Iterator[Strategy]:
        """Settings to search over for a job on a device, the cheapest in time first."""
        raise NotImplementedError

    def apply(self, step: Step, world: World) -> Step:
        """The changed step. The same code runs on fake and on real tensors.

        Raises:
            BadInput: the options cannot serve this step.
        """
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """As they stand in a job file, defaults left out."""
        defaults = (
            {f: getattr(type(self)(), f, None) for f in self.__struct_fields__}
            if self._has_defaults()
            else {}
        )
        return {f: msgspec.to_builtins(getattr(self, f)) for f in self.__struct_fields__
                if f not in defaults or getattr(self, f) != defaults[f]}  # fmt: skip

    def entry(self) -> dict[str, Any]:
        """The ``[[strategy]]`` table."""
        return {"name": self.name, **self.options()}

    @classmethod
    def _has_defaults(cls) -> bool:
        return len(cls.__struct_defaults__) == len(cls.__struct_fields__)
