"""mixed-precision: forward in bf16 or fp16 by autocast, weights and optimizer in float32 (fp16 with a scaler)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from memfit.core.errors import BadInput
from memfit.core.step import Step, World
from memfit.core.strategy import Fidelity, Situation, Stage, Strategy


class MixedPrecision(Strategy, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``dtype``: "bf16" or "fp16" (gradients are then scaled against underflow). Lossy: bf16 keeps 8 bits of
    mantissa, and a step's loss stays within 2 % of the float32 one (``bound``)."""

    name: ClassVar[str] = "mixed-precision"
    stage: ClassVar[Stage] = "step"
    targets: ClassVar[tuple[str, ...]] = ("activations", "temporaries")
    gives: ClassVar[frozenset[str]] = frozenset({"autocast"})
    excludes: ClassVar[frozenset[str]] = frozenset({"autocast"})
    bound: ClassVar[float] = 0.02

    dtype: Literal["bf16", "fp16"] = "bf16"

    @property
    def fidelity(self) -> Fidelity:
        return "lossy"

    @classmethod
    def worth_trying(cls, situation: Situation) -> Iterator[Strategy]:
        if situation.job.model.dtype != "float32":
            return
        half = "float16" if "bfloat16" not in situation.device.flops else "bfloat16"
        yield cls(dtype="bf16" if half == "bfloat16" else "fp16")

    def apply(self, step: Step, world: World) -> Step:
        import torch

        dtype = torch.bfloat16 if self.dtype == "bf16" else torch.float16
        if any(p.dtype != torch.float32 for p in step.model.parameters() if p.requires_grad):
            raise BadInput("mixed_precision.weights", setting="strategy.mixed-precision")
        return replace(step, around_forward=(*step.around_forward, lambda w: w.autocast(dtype)),
                       scaler=step.scaler or self.dtype == "fp16")  # fmt: skip
