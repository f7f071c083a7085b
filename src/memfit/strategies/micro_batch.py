"""micro-batch: the global batch in pieces, gradients accumulated. Nothing is approximated: each piece's mean is
weighted by its items (tokens that carry a label), and an uneven last piece is handled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

from memfit.core.errors import BadInput
from memfit.core.step import Step, World
from memfit.core.strategy import Fidelity, Situation, Stage, Strategy


class MicroBatch(Strategy, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``size``: rows at once. ``batch_norm``: a model with batch statistics would see other statistics in a smaller
    batch; "refuse" (default) or "freeze" them (running statistics are used: lossy, so it must be allowed)."""

    name: ClassVar[str] = "micro-batch"
    stage: ClassVar[Stage] = "data"
    targets: ClassVar[tuple[str, ...]] = ("activations", "temporaries")
    gives: ClassVar[frozenset[str]] = frozenset({"accumulation"})
    bound: ClassVar[float] = 1.0

    size: int = 1
    batch_norm: Literal["refuse", "freeze"] = "refuse"

    @property
    def fidelity(self) -> Fidelity:
        return "lossy" if self.batch_norm == "freeze" else "exact"

    @classmethod
    def worth_trying(cls, situation: Situation) -> Iterator[Strategy]:
        if "batch-statistics" in situation.capabilities:
            return
        rows, seen = situation.rows, set()
        size = rows
        while size > 1:
            size = -(-size // 2)
            if size not in seen and size < rows:
                seen.add(size)
                yield cls(size=size)

    def apply(self, step: Step, world: World) -> Step:
        if not 1 <= self.size <= step.global_batch:
            raise BadInput("micro_batch.size", setting="strategy.micro-batch.size", value=self.size,
                           limit=step.global_batch)  # fmt: skip
        capabilities = step.capabilities
        if "batch-statistics" in capabilities and self.size < step.global_batch:
            if self.batch_norm == "refuse":
                raise BadInput("micro_batch.batch_norm", setting="strategy.micro-batch")
            _freeze(step.model)
            capabilities = capabilities - {"batch-statistics"} | {"batch-separable"}
        return replace(step, micro_batch=self.size, capabilities=capabilities)


def _freeze(model: Any) -> None:
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.eval()
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign,misc]
