"""One process, one device: the ordinary step. The simulator, the runner and the Python API all run this code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memfit.core.errors import BadInput
from memfit.core.step import Batch, OptimizerRecipe, Step, World


def _adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **options)


OPTIMIZERS: dict[str, Any] = {
    "adamw": _adamw,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adafactor": torch.optim.Adafactor,
}


_FOREACH_ON_GPUS = ("adamw", "adam", "sgd", "adagrad", "rmsprop")


def make_optimizer(recipe: OptimizerRecipe, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of a recipe. Raises :class:`BadInput` for an unknown name or a wrong option."""
    if recipe.name not in OPTIMIZERS:
        raise BadInput("input.unknown_name", setting="task.optimizer", value=recipe.name,
                       choices=", ".join(OPTIMIZERS))  # fmt: skip
    try:
        return OPTIMIZERS[recipe.name](list(parameters), **recipe.options)
    except (TypeError, ValueError) as error:
        raise BadInput("engine.optimizer_options", setting="task.optimizer_options", value=recipe.options,
                       reason=str(error)) from None  # fmt: skip


def micro_sizes(rows: int, micro_batch: int) -> list[int]:
    """Rows per micro-batch: full ones, then what is left."""
    full, rest = divmod(rows, micro_batch)
    return [micro_batch] * full + ([rest] if rest else [])


@dataclass
class Prepared:
    """A step with its live optimizer (and scaler): call :meth:`run` once per global batch."""

    step: Step
    world: World
    optimizer: torch.optim.Optimizer
    scaler: Any = None

    def run(self, window: Batch, micro_batch: int | None = None) -> torch.Tensor:
        """One optimizer step over a global batch; returns the mean loss over its items (detached, scalar).

        Each micro-batch's mean is weighted by its items, so the sum is the mean over the whole window whatever
        the cut, uneven last micro-batch and uneven token counts included.
        """
        sizes = micro_sizes(window.rows, micro_batch or self.step.micro_batch)
        parts = self.step.split(window, sizes) if len(sizes) > 1 else [window]
        del window
        items = sum(part.items for part in parts)
        total: torch.Tensor | None = None
        for number in range(len(parts)):
            loss = self.forward_backward(parts[number], parts[number].items / max(items, 1))
            total = loss if total is None else total + loss
        self.update()
        assert total is not None
        return total

    def forward_backward(self, batch: Batch, weight: float) -> torch.Tensor:
        """Forward and backward of one micro-batch; gradients accumulate. Returns its weighted loss, detached."""
        with self.world.phase("forward"):
            if batch.items == 0:  # nothing carries a label: the mean would be 0/0 and contributes nothing
                return torch.zeros((), device=self.world.device)
            loss = self._forward(batch) * weight
        with self.world.phase("backward"):
            (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
        return loss.detach()

    def _forward(self, batch: Batch) -> torch.Tensor:
        from contextlib import ExitStack

        with ExitStack() as stack:
            for context in self.step.around_forward:
                stack.enter_context(context(self.world))
            return self.step.loss(self.step.model, batch.data)

    def update(self) -> None:
        """The optimizer's step over the accumulated gradients, which are then let go."""
        with self.world.phase("optimizer"):
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            if self.step.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.step.model.parameters(), self.step.clip_grad_norm)
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def prepare(step: Step, world: World) -> Prepared:
    """Makes the optimizer over the parameters that train.

    Raises:
        BadInput: no parameter requires a gradient, or the optimizer's options are wrong.
    """
    parameters = [p for p in step.model.parameters() if p.requires_grad]
    if not parameters:
        raise BadInput("engine.nothing_trains", setting="model")
    recipe = step.optimizer
    if (
        not world.target.is_cpu
        and recipe.name in _FOREACH_ON_GPUS
        and not {"fused", "foreach"} & recipe.options.keys()
    ):
        # What torch.optim chooses by itself on a GPU (`_default_to_fused_or_foreach`); a simulated one is no GPU to it.
        recipe = OptimizerRecipe(recipe.name, {**recipe.options, "foreach": True})
    optimizer = make_optimizer(recipe, parameters)
    scaler = torch.amp.GradScaler(world.device.type) if step.scaler else None
    return Prepared(step, world, optimizer, scaler)
