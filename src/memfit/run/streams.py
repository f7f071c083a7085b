"""Where a run's windows come from: the job's data, or the example batch where it names none."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from memfit.core.job import Job
from memfit.core.step import Batch, Step, World
from memfit.core.words import say
from memfit.models.factory import is_factory

_log = logging.getLogger("memfit.run")


class Stream(Protocol):
    """Endless global batches that can be carried on exactly (see
    :class:`memfit.data.batches.TrainingStream`)."""

    description: str

    def next_window(self) -> Batch: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class ExampleStream:
    """The step's own example batch, again and again."""

    def __init__(self, step: Step, world: World) -> None:
        self.description = say("run.no_data_path")
        self._step, self._world = step, world

    def next_window(self) -> Batch:
        return self._step.make_batch(self._step.global_batch, self._world)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def stream_for(job: Job, step: Step, world: World) -> Stream:
    """The job's stream; tokens that are not in the cache yet are made now. Raises as ``open_stream`` does."""
    if job.data.path is None and not job.data.classes:
        return ExampleStream(step, world)
    from memfit.data.batches import open_stream

    hint = None if is_factory(job.model.name) else job.model.name
    return open_stream(job, None, vocabulary=_vocabulary(step.model), tokenizer_hint=hint)


def _vocabulary(model: Any) -> int | None:
    """Rows of a model's token table: no token number may reach it. None for a model without one."""
    ask = getattr(model, "get_input_embeddings", None)
    table = ask() if ask is not None else None
    return getattr(table, "num_embeddings", None)


def fill_cache(job: Job) -> None:
    """Tokenizes a job's data, without the model's weights: in a process of its own, since it needs more
    memory than a stream that only reads."""
    from memfit.models import build_step
    from memfit.run.process import target_device
    from memfit.simulate.fake import SimulatedWorld

    world = SimulatedWorld(target_device(job.budget.device))
    step = build_step(job, world)
    stream_for(job, step, world)
