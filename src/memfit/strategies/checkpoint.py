"""checkpoint: activations of chosen blocks are not kept but recomputed in backward (activation checkpointing)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

from memfit.core.errors import BadInput
from memfit.core.step import Step, World
from memfit.core.strategy import Situation, Stage, Strategy


class Checkpoint(Strategy, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``policy``: "full" (every block), "sqrt" (√n groups of √n blocks, each recomputed as one), "selective" (only
    ``blocks``). ``blocks``: how many blocks, counted from the first, or their indices. The first ones are taken
    because they are recomputed last in backward, when the kept blocks' activations are gone already.

    Dropout repeats the same mask (the generator's state is restored); kept for models that draw random numbers.
    """

    name: ClassVar[str] = "checkpoint"
    stage: ClassVar[Stage] = "model"
    targets: ClassVar[tuple[str, ...]] = ("activations",)
    needs: ClassVar[frozenset[str]] = frozenset({"blocks"})
    excludes: ClassVar[frozenset[str]] = frozenset({"recomputed-blocks"})
    gives: ClassVar[frozenset[str]] = frozenset({"recomputed-blocks"})

    policy: Literal["full", "sqrt", "selective"] = "full"
    blocks: int | tuple[int, ...] | None = None

    @classmethod
    def worth_trying(cls, situation: Situation) -> Iterator[Strategy]:
        if "blocks" not in situation.capabilities or "batch-statistics" in situation.capabilities:
            return
        count = situation.blocks
        step = max(1, count // 10)
        for blocks in range(step, count, step):
            yield cls(policy="selective", blocks=blocks)
        yield cls(policy="full")
        if count >= 9:
            yield cls(policy="sqrt")

    def apply(self, step: Step, world: World) -> Step:
        if "batch-statistics" in step.capabilities:
            raise BadInput("checkpoint.batch_norm", setting="strategy.checkpoint")
        chosen = self._chosen(len(step.blocks))
        random = "dropout" in step.capabilities
        if self.policy == "sqrt":
            blocks = _group(step.model, step.blocks, random)
            return replace(step, blocks=blocks)
        for index in chosen:
            _wrap(step.model.get_submodule(step.blocks[index]), random)
        return step

    def _chosen(self, count: int) -> tuple[int, ...]:
        if (self.blocks is not None) != (self.policy == "selective"):
            raise BadInput("checkpoint.blocks", setting="strategy.checkpoint.blocks", value=self.blocks)
        if self.blocks is None:
            return tuple(range(count))
        chosen = tuple(range(self.blocks)) if isinstance(self.blocks, int) else self.blocks
        bad = [b for b in chosen if not 0 <= b < count]
        if bad or not chosen:
            raise BadInput(
                "checkpoint.range", setting="strategy.checkpoint.blocks", value=self.blocks, count=count
            )
        return chosen


def _wrap(module: Any, random: bool) -> None:
    """Replaces the block's forward by a checkpointed one; the module, its name and its parameters stay."""
    from torch.utils.checkpoint import checkpoint

    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Non-reentrant: works with frozen inputs and keyword arguments, and stops recomputing as soon as it can.
        return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=random, **kwargs)

    module.forward = forward
    module.recomputed = True  # seen by whoever compares blocks: this one differs from a kept one


def _group(model: Any, paths: tuple[str, ...], random: bool) -> tuple[str, ...]:
    """Puts √n neighbours of one list into a group that is recomputed as one. Returns the groups' paths.

    Raises:
        BadInput: the blocks do not stand in one list, or are called with more than one positional argument.
    """
    import torch

    container_path = paths[0].rpartition(".")[0]
    if any(p.rpartition(".")[0] != container_path for p in paths) or len(paths) < 4:
        raise BadInput("checkpoint.sqrt", setting="strategy.checkpoint.policy", value="sqrt")

    class Group(torch.nn.Module):
        """Runs its blocks one after another; what a block returns is the next one's first argument."""

        def __init__(self, blocks: list[Any]) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(blocks)

        def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
            for block in self.blocks:
                out = block(hidden, *args, **kwargs)
                hidden = out[0] if isinstance(out, tuple) else out
            return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

    container = model.get_submodule(container_path)
    blocks = list(container)
    size = max(1, round(math.sqrt(len(blocks))))
    groups = [Group(blocks[i : i + size]) for i in range(0, len(blocks), size)]
    for _ in range(len(blocks)):
        del container[0]
    for group in groups:
        container.append(group)
        _wrap(group, random)
    return tuple(f"{container_path}.{i}" for i in range(len(groups)))
