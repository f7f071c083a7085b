"""One warm step on fake tensors -> Profile."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch

from memfit.core.device import Device
from memfit.core.errors import CannotSimulate, MemfitError
from memfit.core.profile import Profile
from memfit.core.step import Batch, Step, World
from memfit.core.strategy import Strategy
from memfit.engines.in_process import Prepared, micro_sizes, prepare
from memfit.simulate.data_dependent import Shadows
from memfit.simulate.depth import block_paths, shorten
from memfit.simulate.fake import SimulatedWorld, fake_batch, make_fake
from memfit.simulate.profile_of import profile_of
from memfit.simulate.recorder import Recorder
from memfit.simulate.seconds import roofline
from memfit.simulate.trace import Storage, Trace, expand
from memfit.strategies import apply_all

Build = Callable[[World], Step]


class _NeedsFullDepth(Exception):
    """Repeated blocks turned out not to be alike."""


def simulate(
    build: Build, strategies: Iterable[Strategy], device: Device, *, full_depth: bool = False
) -> Profile:
    """Predicts one warm optimizer step (state exists) of a job under a combination of strategies.

    Args:
        build: makes the step in a world (a fresh one for each simulation).
        full_depth: record every repeated block (the long way; the short one gives the same).

    Raises:
        CannotSimulate: the step needs something that no simulation has.
        BadInput: a strategy cannot be applied.
    """
    strategies = tuple(strategies)
    while True:
        try:
            return _simulate(build, strategies, device, full_depth)
        except _NeedsFullDepth:
            full_depth = True
        except (MemfitError, KeyboardInterrupt):
            raise
        except Exception as error:  # the user's model ran: whatever it raised is an answer about the input
            raise _explain(error) from error


def _explain(error: BaseException) -> CannotSimulate:
    frames = [f for f in traceback.extract_tb(error.__traceback__)
              if "/torch/" not in f.filename and "/memfit/" not in f.filename]  # fmt: skip
    where = f"{frames[-1].filename}:{frames[-1].lineno} {frames[-1].line}" if frames else "-"
    lines = str(error).strip().splitlines()
    return CannotSimulate(
        "simulate.failed", reason=f"{type(error).__name__}: {lines[0] if lines else ''}", where=where
    )


def _simulate(build: Build, strategies: tuple[Strategy, ...], device: Device, full_depth: bool) -> Profile:
    world = SimulatedWorld(device)
    step = apply_all(strategies, build(world), world)
    runs = [] if full_depth else shorten(step.model)
    shadows = Shadows()
    batches = example_batches(step, world)
    with world.entered():
        make_fake(step.model, world)
        prepared = prepare(step, world)
        recorder = Recorder(step.model, block_paths(step.model), world.device, roofline(device), shadows)
        trace, weights = record_step(
            prepared, world, recorder, [fake_batch(b, world, shadows.keep) for b in batches]
        )
        trace.storages, trace.events = _with_workspaces(trace, world, weights)
    for run in runs:
        longer = expand(trace, run)
        if longer is None:
            raise _NeedsFullDepth
        trace = longer
    per_phase: dict[int, float] = {}
    for (phase, _), seconds in trace.seconds.items():
        per_phase[phase] = per_phase.get(phase, 0.0) + seconds * weights.get(phase, 1.0)
    return profile_of(
        trace, device, origin="predicted", step_seconds=sum(per_phase.values()), phase_seconds=per_phase,
        assumptions=tuple(sorted(shadows.assumptions)),
        uncertainty=(0.01 if device.is_cpu else 0.05, 0.25 if device.origin == "measured" else 0.5),
    )  # fmt: skip


def example_batches(step: Step, world: SimulatedWorld) -> list[Batch]:
    """Real example batches (integers are small and their values can matter): on a CPU the whole window, which lies
    in the same memory; for a GPU the micro-batches that are recorded."""
    if world.target.is_cpu:
        return [step.make_batch(step.global_batch, world)]
    return [step.make_batch(rows, world) for rows in micro_sizes(step.global_batch, step.micro_batch)[:2]]


def record_step(
    prepared: Prepared, world: SimulatedWorld, recorder: Recorder, batches: list[Batch]
) -> tuple[Trace, dict[int, float]]:
    """Runs a warm step under the recorder: the optimizer's state is made by a first update, then two micro-batches
    (all later ones repeat the second) and the update are recorded. Returns the trace and how often each phase
    counts in the step's seconds."""
    step = prepared.step
    sizes = micro_sizes(step.global_batch, step.micro_batch)
    warm_up(prepared)
    track_all(prepared, recorder, [b.data for b in batches])
    parts = step.split(batches[0], sizes)[:2] if world.target.is_cpu and len(sizes) > 1 else batches
    world.recorder = recorder
    items = sum(p.items for p in parts)
    with recorder:
        for part in parts:
            prepared.forward_backward(part, part.items / max(items, 1))
        prepared.update()
    world.recorder = None
    recorder.classify()
    weights: dict[int, float] = {}
    if len(sizes) > 2:
        rest = sum(sizes[1:]) / sizes[1]
        weights = {3: rest, 4: rest}
    return trace_of(recorder), weights


def warm_up(prepared: Prepared) -> None:
    """Makes the optimizer's state with an update over zero gradients."""
    for parameter in prepared.step.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    prepared.optimizer.step()
    prepared.optimizer.zero_grad(set_to_none=True)


def track_all(prepared: Prepared, recorder: Recorder, inputs: Any) -> list[Any]:
    """Counts what is there before the step: weights, buffers, optimizer state, inputs; tags gradients as they come.
    Returns the gradients' hooks, to be removed by a caller whose model lives on."""
    model = prepared.step.model
    for path, parameter in model.named_parameters():
        recorder.track(parameter, "weights", path.rpartition(".")[0])
    for path, buffer in model.named_buffers():
        recorder.track(buffer, "weights", path.rpartition(".")[0])
    paths = {id(p): path.rpartition(".")[0] for path, p in model.named_parameters()}
    track_state(prepared.optimizer, recorder, paths)

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            recorder.track(value, "inputs")
        elif isinstance(value, dict):
            for v in value.values():
                visit(v)
        elif isinstance(value, list | tuple):
            for v in value:
                visit(v)

    visit(inputs)

    def tag(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            recorder.track(parameter.grad, "gradients", paths[id(parameter)])

    return [p.register_post_accumulate_grad_hook(tag) for p in model.parameters() if p.requires_grad]


def track_state(optimizer: torch.optim.Optimizer, recorder: Recorder, paths: dict[int, str]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    recorder.track(value, "optimizer", paths.get(id(parameter), ""))


def trace_of(recorder: Recorder) -> Trace:
    storages = [Storage(r.size, r.kind, r.place, r.path, r.op, r.phase) for r in recorder.records]
    return Trace(storages, list(recorder.events), dict(recorder.seconds))


def _with_workspaces(
    trace: Trace, world: SimulatedWorld, weights: dict[int, float]
) -> tuple[list[Storage], list]:
    """Library workspaces are there from the first step on: they stand at the beginning."""
    sizes = world.dialect.workspaces(training=True)
    storages = [*trace.storages, *(Storage(s, "workspace", "device", "", "workspace", "load") for s in sizes)]
    first = len(trace.storages)
    births = [(0, first + n, "") for n in range(len(sizes))]
    return storages, [*births, *trace.events]
