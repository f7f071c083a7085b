"""The only wiring: what the rooms offer, joined. The command line and ``import memfit`` both come here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.core.device import Device
from memfit.core.errors import BadInput, MissingExtra
from memfit.core.job import Job, make_job, read_job
from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.units import parse_bytes

if TYPE_CHECKING:
    from memfit.run.launch import RunResult

JobLike = str | Path | Mapping[str, Any] | Job


def load_job(
    job: JobLike, overrides: Sequence[str] = (), *, device: str | None = None, budget: str | int | None = None,
    allow: Sequence[str] = (),
) -> Job:  # fmt: skip
    """A job from a file, a dictionary or a Job, with the common options of the command line on top.

    Raises:
        BadInput: see :func:`memfit.core.job.read_job`; an allowed strategy that does not exist.
    """
    import msgspec

    from memfit.strategies import shelf

    if isinstance(job, Job):
        found = job
    elif isinstance(job, Mapping):
        found = make_job(dict(job), list(overrides))
    else:
        found = read_job(job, list(overrides))
    changes: dict[str, Any] = {}
    if device is not None:
        changes["device"] = device
    if budget is not None:
        parse_bytes(budget, key="--budget")
        changes["memory"] = budget
    if allow:
        changes["allow"] = (*found.budget.allow, *allow)
    found = msgspec.structs.replace(found, budget=msgspec.structs.replace(found.budget, **changes))
    for name in found.budget.allow:
        if name not in shelf():
            raise BadInput(
                "input.unknown_name", setting="budget.allow", value=name, choices=", ".join(shelf())
            )
    if found.task.kind != "train":
        raise BadInput("api.kind", setting="task.kind", value=found.task.kind)
    if found.budget.devices != 1:
        raise BadInput("api.devices", setting="budget.devices", value=found.budget.devices)
    return found


def target_of(job: Job) -> tuple[Device, int]:
    """The device that a job is for, and its budget in bytes for the whole process (left out: the device's own).

    Raises:
        BadInput: an unknown device, or a budget above what the device has.
    """
    from memfit.devices import get_device

    device = get_device(job.budget.device)
    budget = job.budget.memory_bytes()
    if budget is not None and budget > device.memory_bytes:
        raise BadInput("api.above_device", setting="budget.memory", value=job.budget.memory, device=device.name,
                       limit=device.memory_bytes)  # fmt: skip
    return device, budget or device.memory_bytes


def builder(job: Job, parts: tuple[Any, Any, Any] | None = None) -> Callable[[Any], Any]:
    """(world) -> Step, a fresh one at each call. ``parts``: (model or factory, batch, loss) from Python."""
    _need("torch", "torch")
    from memfit.models import build_step, step_from_parts

    if parts is None:
        return lambda world: build_step(job, world)
    model, batch, loss = parts

    def build(world: Any) -> Any:
        import copy

        import torch

        if isinstance(model, torch.nn.Module):
            made = copy.deepcopy(model).to("meta") if world.simulated else model
        elif world.simulated:
            with torch.device("meta"):
                made = model()
        else:
            made = model()
        if isinstance(made, tuple):
            made = made[0]
        return step_from_parts(made, batch, loss, job)

    return build


def _need(package: str, extra: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise MissingExtra(package, extra)


def estimate(job: JobLike, **options: Any) -> Profile:
    """Predicts a job as it stands: one warm step, its own strategies and no others. Options as :func:`load_job`.

    Raises:
        BadInput: the job cannot be used. CannotSimulate: its step cannot be simulated.
    """
    found = load_job(job, **options)
    device, _ = target_of(found)
    return _estimate(found, device, builder(found))


def _estimate(job: Job, device: Device, build: Any) -> Profile:
    from memfit.simulate.simulator import simulate
    from memfit.strategies import read_strategy

    return simulate(build, [read_strategy(entry) for entry in job.strategy], device)


def plan(
    job: JobLike | None = None, *, model: Any = None, batch: Any = None, loss: Any = None, optimizer: str = "adamw",
    optimizer_options: Mapping[str, Any] | None = None, global_batch: int | None = None,
    on_simulated: Callable[[int], None] | None = None, **options: Any,
) -> Any:  # fmt: skip
    """The fastest combination of strategies that fits.

    From a job (file, dictionary or :class:`Job`): a :class:`Plan`. From Python parts: a
    :class:`memfit.run.live.LivePlan`, whose ``apply(model)`` prepares the real model.

    Args:
        model: a factory (called without weights to plan), or a module. batch: an example batch (dim 0: rows).
        loss: (model, batch) -> scalar mean. optimizer: its name. global_batch: rows per step; left out: the batch's.
        options: ``budget``, ``device``, ``allow`` as on the command line.
    """
    from memfit.plan.planner import make_plan

    if job is not None:
        found = load_job(job, **options)
        device, budget = target_of(found)
        return make_plan(found, device, builder(found), budget, on_simulated=on_simulated)
    if model is None or batch is None or loss is None:
        raise BadInput("api.parts", setting="plan")
    from memfit.run.live import LivePlan

    table: dict[str, Any] = {
        "model": {"name": getattr(model, "__name__", type(model).__name__)},
        "task": {"optimizer": optimizer, "optimizer_options": dict(optimizer_options or {}),
                 "global_batch": global_batch or 1},
    }  # fmt: skip
    found = load_job(table, **options)
    device, budget = target_of(found)
    parts = (model, batch, loss)
    made = make_plan(found, device, builder(found, parts), budget, on_simulated=on_simulated)
    return LivePlan(made, device, lambda real: builder(found, (real, batch, loss)), wrap_batch)


def wrap_batch(data: Any) -> Any:
    """A user's batch with its rows and items counted."""
    from memfit.core.step import Batch
    from memfit.models.batches import count_items, count_rows

    rows = count_rows(data)
    return Batch(data, rows, count_items(data, rows))


def fit(
    job: JobLike, *, folder: str | Path | None = None, on_progress: Callable[[dict[str, Any]], None] | None = None,
    on_simulated: Callable[[int], None] | None = None, **options: Any,
) -> RunResult:  # fmt: skip
    """Plans, runs and verifies a training job. Returns the run's result: plan, measured profile, verdict, losses.

    Raises:
        BadInput: the job or its data cannot be used. DoesNotFit: nothing meets the budget.
        RunFailed: the real run stopped. Interrupted: the user stopped it (state is saved).
    """
    found = load_job(job, **options)
    return run(found, plan(found, on_simulated=on_simulated), folder=folder, on_progress=on_progress)


def run(
    job: Job, made: Plan, *, folder: str | Path | None = None,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> RunResult:  # fmt: skip
    """Runs and verifies a plan that was made before. Raises as :func:`fit`."""
    from memfit.run.launch import run_planned

    return run_planned(job, made, folder=folder, on_progress=on_progress)


def strategy_table() -> list[dict[str, Any]]:
    """The shelf as rows: name, stage, fidelity, options (with their defaults), what it needs, what it is."""
    from memfit.plan.reasons import title
    from memfit.strategies import shelf

    return [
        {
            "name": name,
            "stage": kind.stage,
            "fidelity": kind().fidelity,
            "options": ", ".join(f"{f}={getattr(kind(), f)}" for f in kind.__struct_fields__),
            "needs": ", ".join(sorted(kind.needs)) or "-",
            "title": title(name),
        }
        for name, kind in shelf().items()
    ]
