"""memfit: predict, plan, run and verify deep-learning jobs inside the memory that you have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["BadInput", "DoesNotFit", "Job", "MemfitError", "Plan", "Profile", "Verdict", "__version__", "estimate", "fit",
           "plan"]  # fmt: skip

if TYPE_CHECKING:
    from memfit.api import estimate, fit, plan
    from memfit.core.errors import BadInput, DoesNotFit, MemfitError
    from memfit.core.job import Job
    from memfit.core.plan import Plan, Verdict
    from memfit.core.profile import Profile

_HOMES = {
    "estimate": "api", "fit": "api", "BadInput": "core.errors", "DoesNotFit": "core.errors", "MemfitError": "core.errors",
    "Job": "core.job", "Plan": "core.plan", "Verdict": "core.plan", "Profile": "core.profile",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    import importlib

    if name == "plan":  # the room of that name, which can be called
        return importlib.import_module("memfit.plan")
    if name not in _HOMES:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"memfit.{_HOMES[name]}"), name)
