"""Models: the catalogue (data, no torch) and the building of a training step from a name, folder or factory.

``names``, ``entry`` and ``table`` read the catalogue only. ``build_step`` and ``step_from_parts`` import
torch when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memfit.models.entries import Entry, entry, names, resolve, table

if TYPE_CHECKING:
    from memfit.core.job import Job
    from memfit.core.step import Step, World

__all__ = ["Entry", "build_step", "entry", "names", "resolve", "step_from_parts", "table"]


def build_step(job: Job, world: World) -> Step:
    """The unmodified step of a job: see :func:`memfit.models.build.build_step`."""
    from memfit.models import build

    return build.build_step(job, world)


def step_from_parts(model: Any, batch: Any, loss: Any, job: Job) -> Step:
    """A step from a user's own parts: see :func:`memfit.models.factory.step_from_parts`."""
    from memfit.models import factory

    return factory.step_from_parts(model, batch, loss, job)
