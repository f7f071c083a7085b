"""From a job and a budget to a Plan, with its reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memfit.core.device import Device
from memfit.core.job import Job
from memfit.core.plan import Plan, Point
from memfit.core.strategy import Situation
from memfit.plan.reasons import choices, needs, prefetch_reasons, questions, rejected
from memfit.plan.search import Search, axes_for
from memfit.plan.simulations import Entries, Simulations
from memfit.strategies import read_strategy, shelf


def situation_of(job: Job, device: Device, build: Any) -> Situation:
    """What strategies may look at: read off the step as it is built for the simulated world."""
    from memfit.simulate.fake import SimulatedWorld

    step = build(SimulatedWorld(device))
    return Situation(
        job=job, device=device, capabilities=step.capabilities, blocks=len(step.blocks),
        classes=step.head.classes if step.head else 0, rows=step.global_batch,
        items_per_row=job.task.sequence_length or 1,
    )  # fmt: skip


def make_plan(
    job: Job, device: Device, build: Any, budget_bytes: int, *, file: str | None = None,
    deadline_seconds: float = 9.0, on_simulated: Callable[[int], None] | None = None,
) -> Plan:  # fmt: skip
    """The fastest simulated combination whose process peak stays under the budget less its margin.

    Args:
        build: (world) -> Step, a fresh one each time.
        budget_bytes: for the whole process on one device.
        deadline_seconds: after this the search ends with the best that it has (reasons come on top).

    Raises:
        BadInput: a strategy of the job is unknown, or cannot be applied.
        CannotSimulate: the job's own step cannot be simulated.
    """
    fixed: Entries = tuple(read_strategy(entry, file) for entry in job.strategy)
    limit = int(budget_bytes * (1 - job.budget.margin))
    simulations = Simulations(build, device, limit, on_simulated)
    baseline = simulations.profile(fixed)
    if baseline is None:
        from memfit.simulate.simulator import simulate

        baseline = simulate(build, fixed, device)  # raises, and says why
    situation = situation_of(job, device, build)
    kinds = tuple(shelf().values())
    axes = axes_for(situation, kinds, fixed, lossy=False, allow=job.budget.allow)
    best = Search(simulations, axes, fixed, deadline_seconds).run()
    if not simulations.fits(best.profile) and job.budget.allow:
        axes = axes_for(situation, kinds, fixed, lossy=True, allow=job.budget.allow)
        best = Search(simulations, axes, fixed, deadline_seconds * 2).run()
    fits = simulations.fits(best.profile)
    prefetch_reasons(simulations, situation, best.entries, kinds)
    chosen = choices(simulations, best.entries, fixed)
    return Plan(
        job=job, device=device.name, budget_bytes=budget_bytes, fits=fits, choices=chosen,
        rejected=rejected(simulations, situation, best.entries, best.profile, kinds, job.budget.allow),
        questions=questions(simulations, baseline, best.entries, best.profile, budget_bytes, fits),
        frontier=frontier(simulations), profile=best.profile, baseline=baseline,
        needs=() if fits else needs(simulations, situation, best, kinds, job.budget.allow, budget_bytes),
        simulations=simulations.count, seconds=simulations.seconds,
    )  # fmt: skip


def frontier(simulations: Simulations) -> tuple[Point, ...]:
    """Combinations that no other simulated one beats in both process peak and seconds, the smallest first."""
    points = sorted(
        (
            Point(
                peak_bytes=p.peak_bytes,
                process_bytes=p.process_bytes,
                step_seconds=p.step_seconds,
                strategies=tuple(s.entry() for s in entries),
            )  # fmt: skip
            for entries, p in simulations.known()
        ),
        key=lambda point: (point.process_bytes, point.step_seconds),
    )
    kept: list[Point] = []
    for point in points:
        if not kept or point.step_seconds < kept[-1].step_seconds:
            kept.append(point)
    return tuple(kept)
