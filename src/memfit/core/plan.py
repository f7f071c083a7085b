"""Plan and Verdict: what was chosen, why, and whether it held."""

from __future__ import annotations

from typing import Any

import msgspec

from memfit.core.job import Job
from memfit.core.profile import Profile


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy in a plan, with what it brings *in this plan* (peak and seconds without it, minus with)."""

    name: str
    options: dict[str, Any]
    fidelity: str
    saves_bytes: int
    costs_seconds: float
    why: str
    fixed: bool = False


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy that the plan goes without, and why."""

    name: str
    options: dict[str, Any]
    why: str
    peak_bytes: int | None = None
    step_seconds: float | None = None


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated combination on (or near) the frontier."""

    peak_bytes: int
    process_bytes: int
    step_seconds: float
    strategies: tuple[dict[str, Any], ...]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the decision tree: what was asked, the answer, the figures behind it."""

    asked: str
    answer: str
    depth: int = 0
    figures: dict[str, float] = {}


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A combination that was simulated as a whole. ``fits`` is false where nothing meets the budget; then
    ``profile`` is the nearest plan's and ``needs`` says what would have to be allowed or added."""

    job: Job
    device: str
    budget_bytes: int
    fits: bool
    choices: tuple[Choice, ...]
    rejected: tuple[Rejected, ...]
    questions: tuple[Question, ...]
    frontier: tuple[Point, ...]
    profile: Profile
    baseline: Profile
    needs: tuple[str, ...] = ()
    simulations: int = 0
    seconds: float = 0.0

    @property
    def strategies(self) -> tuple[dict[str, Any], ...]:
        """As they stand in a job file."""
        return tuple({"name": c.name, **c.options} for c in self.choices)

    def to_json(self) -> dict[str, Any]:
        shown = self.profile.to_json(self.budget_bytes)
        shown["fits"] = self.fits
        shown["strategies"] = [msgspec.to_builtins(c) for c in self.choices]
        shown["rejected"] = [msgspec.to_builtins(r) for r in self.rejected]
        shown["questions"] = [msgspec.to_builtins(q) for q in self.questions]
        shown["baseline"] = self.baseline.to_json(self.budget_bytes)
        shown["frontier"] = [msgspec.to_builtins(p) for p in self.frontier]
        shown["simulations"] = self.simulations
        if not self.fits:
            shown["nearest"] = {
                "strategies": list(self.strategies),
                "peak_bytes": self.profile.peak_bytes,
                "process_bytes": self.profile.process_bytes,
                "needs": list(self.needs),
            }
        return shown


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction against measurement. Errors are (predicted - measured) / measured."""

    within_budget: bool
    peak_error: float
    process_error: float | None
    seconds_error: float | None
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_process_bytes: int
    measured_process_bytes: int | None
    budget_bytes: int
    steps: int = 0
    recoveries: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    loss_finite: bool = True


def judge(predicted: Profile, measured: Profile, budget_bytes: int, **run: Any) -> Verdict:
    """Compare two profiles of the same plan; ``run`` adds the runner's own figures."""

    def error(a: float, b: float) -> float | None:
        return (a - b) / b if b else None

    return Verdict(
        within_budget=(measured.process_bytes or measured.peak_bytes) <= budget_bytes,
        peak_error=error(predicted.peak_bytes, measured.peak_bytes) or 0.0,
        process_error=error(predicted.process_bytes, measured.process_bytes),
        seconds_error=error(predicted.step_seconds, measured.step_seconds),
        predicted_peak_bytes=predicted.peak_bytes,
        measured_peak_bytes=measured.peak_bytes,
        predicted_process_bytes=predicted.process_bytes,
        measured_process_bytes=measured.process_bytes or None,
        budget_bytes=budget_bytes,
        **run,
    )
