"""fused-optimizer: how the update walks over the parameters: all in lists with temporaries (foreach), in one kernel
per list (fused), or one by one (loop)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from memfit.core.errors import BadInput
from memfit.core.step import OptimizerRecipe, Step, World
from memfit.core.strategy import Situation, Stage, Strategy

_FUSED = ("adamw", "adam", "sgd", "adagrad")
_FOREACH = ("adamw", "adam", "sgd", "adagrad", "rmsprop", "adafactor")


class FusedOptimizer(Strategy, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``kind``: "fused" (no temporaries), "loop" (temporaries of one parameter), "foreach" (temporaries of all: the
    library's default on GPUs)."""

    name: ClassVar[str] = "fused-optimizer"
    stage: ClassVar[Stage] = "optimizer"
    targets: ClassVar[tuple[str, ...]] = ("temporaries",)
    excludes: ClassVar[frozenset[str]] = frozenset({"optimizer-chosen"})
    gives: ClassVar[frozenset[str]] = frozenset({"optimizer-chosen"})

    kind: Literal["fused", "loop", "foreach"] = "fused"

    @classmethod
    def worth_trying(cls, situation: Situation) -> Iterator[Strategy]:
        name = situation.job.task.optimizer
        if name in _FUSED:
            yield cls(kind="fused")
        if name in _FOREACH:
            yield cls(kind="loop")

    def apply(self, step: Step, world: World) -> Step:
        valid = {"fused": _FUSED, "foreach": _FOREACH, "loop": _FOREACH}[self.kind]
        if step.optimizer.name not in valid:
            raise BadInput("fused_optimizer.kind", setting="strategy.fused-optimizer.kind", value=self.kind,
                           optimizer=step.optimizer.name, choices=", ".join(valid))  # fmt: skip
        options = {k: v for k, v in step.optimizer.options.items() if k not in ("fused", "foreach")}
        if self.kind == "fused":
            options["fused"] = True
        else:
            options["foreach"] = self.kind == "foreach"
        return replace(step, optimizer=OptimizerRecipe(step.optimizer.name, options))
