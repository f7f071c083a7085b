"""A plan in a user's own Python loop: the real model goes in, one call per global batch comes out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from memfit.core.device import Device
from memfit.core.plan import Plan, Verdict, judge
from memfit.core.profile import Profile
from memfit.core.step import Batch, Step, World
from memfit.engines.in_process import Prepared, prepare
from memfit.run.measure import measure_step, median
from memfit.run.recover import OutOfMemory, run_whole
from memfit.run.world import RealWorld
from memfit.strategies import apply_all, read_strategy


class LivePlan:
    """What ``memfit.plan(model=…)`` returns. The plan's own figures are attributes of ``plan``.

    Args:
        make_builder: (real model) -> ((world) -> Step).
        wrap: (data) -> Batch, which counts rows and items.
    """

    def __init__(self, plan: Plan, device: Device, make_builder: Callable[[Any], Callable[[World], Step]],
                 wrap: Callable[[Any], Batch]) -> None:  # fmt: skip
        self.plan, self.device = plan, device
        self._make_builder, self._wrap = make_builder, wrap

    @property
    def fits(self) -> bool:
        return self.plan.fits

    def apply(self, model: torch.nn.Module) -> LiveRun:
        """Prepares the real model by the plan's strategies (in place) and makes its optimizer.

        Raises:
            DoesNotFit: nothing met the budget. BadInput: the plan is for a device that this machine is not.
        """
        from memfit.run.launch import check_plan

        check_plan(self.plan)
        world = RealWorld(self.device)
        step = self._make_builder(model.to(world.device))(world)
        strategies = [read_strategy(entry) for entry in self.plan.strategies]
        return LiveRun(self.plan, prepare(apply_all(strategies, step, world), world), world, self._wrap)


class LiveRun:
    """A prepared model. ``optimizer`` is the live one (a scheduler may hold it); ``incidents``: recoveries."""

    MEASURED_STEP = 2  # the first with optimizer state

    def __init__(
        self, plan: Plan, prepared: Prepared, world: RealWorld, wrap: Callable[[Any], Batch]
    ) -> None:
        self.plan, self.prepared, self.world, self._wrap = plan, prepared, world, wrap
        self.micro_batch = prepared.step.micro_batch
        self.incidents: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.measured: Profile | None = None
        self._seconds: list[float] = []

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.prepared.optimizer

    @property
    def model(self) -> torch.nn.Module:
        return self.prepared.step.model

    def step(self, data: Any) -> torch.Tensor:
        """One optimizer step over a global batch: micro-batches, precision, checkpointing inside. Out of memory is
        met by a smaller micro-batch with the same global batch; the step is redone whole.

        Args:
            data: a nest of tensors shaped as the example batch (dim 0: rows).

        Returns:
            The mean loss over the batch's items, detached.

        Raises:
            RunFailed: it does not fit at a micro-batch of 1 either.
        """
        window = self._wrap(data)
        number = len(self.losses) + 1
        started = time.perf_counter()

        def run(rows: int) -> float:
            if number != self.MEASURED_STEP:
                return float(self.prepared.run(window, rows))
            loss, self.measured = measure_step(self.prepared, window, self.world, rows)
            return loss

        loss, self.micro_batch = run_whole(
            self.prepared, self.world, self.micro_batch, run, step=number, budget_bytes=self.plan.budget_bytes,
            kept="-", on_recovery=self._recovered,
        )  # fmt: skip
        if number > self.MEASURED_STEP:
            self._seconds.append(time.perf_counter() - started)
        self.losses.append(loss)
        return torch.tensor(loss)

    def _recovered(self, failure: OutOfMemory, rows: int) -> None:
        self.incidents.append({"step": failure.step, "phase": failure.phase, "micro_batch": rows})

    def verdict(self) -> Verdict | None:
        """Prediction against measurement; None before the second step has run. The process's own counter is left
        out: an interactive process holds more than this step."""
        import msgspec

        if self.measured is None:
            return None
        seconds = median(self._seconds) if self._seconds else self.measured.step_seconds
        measured = msgspec.structs.replace(self.measured, step_seconds=seconds, process_bytes=0)
        return judge(
            self.plan.profile, measured, self.plan.budget_bytes, steps=len(self.losses), recoveries=len(self.incidents),
            first_loss=self.losses[0], last_loss=self.losses[-1],
        )  # fmt: skip
