"""Step and World: one ordinary training step, and where it runs. Strategies turn a Step into another Step.

Nothing here imports torch: the classes hold torch objects, they do not make them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from memfit.core.device import Device

if TYPE_CHECKING:
    import torch


class World(Protocol):
    """Where a step runs: fake tensors on a simulated device, or real ones.

    Attributes:
        device: where the step's tensors live.
        host: where offloaded tensors live (the same as ``device`` on a real CPU).
        target: the device whose dialect is spoken, allocator modelled, speed assumed.
        simulated: whether tensors are fake: nothing is computed, nothing is read from disk.
    """

    device: torch.device
    host: torch.device
    target: Device
    simulated: bool

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Automatic mixed precision with the lists of the *target*."""
        ...

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Marks forward, backward or optimizer for whoever records."""
        ...


@dataclass(frozen=True)
class Batch:
    """Input of one (micro-)batch. ``data``: any nest of dicts, lists and tuples of tensors; ``rows``: number of
    samples; ``items``: what the loss is a mean over (tokens that carry a label, or rows)."""

    data: Any
    rows: int
    items: int


@dataclass(frozen=True)
class OptimizerRecipe:
    """``name`` (adamw, sgd, adafactor, …) and the keyword arguments of its constructor."""

    name: str = "adamw"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Head:
    """A projection to many classes and the loss on top: what chunked-loss takes over.

    ``module``: path of the projection (weight (classes, hidden), maybe bias); ``shift``: labels are the next
    token's; ``hidden``: a function (model, data) -> (hidden (rows, length, hidden), labels (rows, length)) that runs
    the model without the projection.
    """

    module: str
    classes: int
    shift: bool
    hidden: Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Step:
    """One optimizer step of a job, ready to be changed by strategies and then run by an engine.

    Attributes:
        model: an ``nn.Module``; on ``meta`` in a simulated world until the simulator makes it fake.
        loss: (model, data) -> scalar, the mean over the batch's items.
        make_batch: (rows, world) -> an example Batch on the world's device, for simulation and probes.
        split: (batch, sizes in rows) -> micro-batches.
        blocks: module paths of repeated blocks, in execution order (what checkpointing may recompute).
        around_forward: context managers (from a world) that are open during forward and loss.
        scaler: whether gradients are scaled against underflow (fp16).
        capabilities: what strategies may ask for: "batch-separable", "batch-statistics", "blocks",
            "vocabulary-head", "dropout", "frozen-parameters"; strategies add what they bring.
        applied: the strategies' names and options, in order.
    """

    model: Any
    loss: Callable[[Any, Any], Any]
    make_batch: Callable[[int, World], Batch]
    split: Callable[[Batch, list[int]], list[Batch]]
    global_batch: int
    micro_batch: int
    optimizer: OptimizerRecipe
    blocks: tuple[str, ...] = ()
    head: Head | None = None
    clip_grad_norm: float | None = None
    around_forward: tuple[Callable[[World], AbstractContextManager[Any]], ...] = ()
    scaler: bool = False
    capabilities: frozenset[str] = frozenset()
    applied: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
