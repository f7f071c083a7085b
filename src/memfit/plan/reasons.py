"""Why this plan: what each strategy brings in it, why others stay out, the questions asked on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memfit.core.plan import Choice, Question, Rejected
from memfit.core.profile import Profile
from memfit.core.strategy import Situation, Strategy
from memfit.core.words import say
from memfit.plan.simulations import Entries, Simulations


def title(name: str) -> str:
    """A strategy's name in words; its catalogue key is its file's name."""
    return say(f"{name.replace('-', '_')}.title")


def prefetch_reasons(
    simulations: Simulations, situation: Situation, entries: Entries, kinds: Sequence[type[Strategy]]
) -> None:
    """Simulates side by side what the reasons will ask for: the plan without each of its parts, and with others."""
    taken = {s.name for s in entries}
    wanted: list[Entries] = [tuple(s for s in entries if s is not strategy) for strategy in entries]
    for kind in kinds:
        if kind.name not in taken and not kind.needs - situation.capabilities:
            wanted += [(*entries, option) for option in list(kind.worth_trying(situation))[:1]]
    simulations.prefetch(wanted)


def choices(simulations: Simulations, entries: Entries, fixed: Entries) -> tuple[Choice, ...]:
    """Each chosen strategy with the plan's peak and seconds without it, minus with it."""
    whole = simulations.profile(entries)
    assert whole is not None
    found: list[Choice] = []
    for strategy in entries:
        without = simulations.profile(tuple(s for s in entries if s is not strategy))
        saves = (without.peak_bytes - whole.peak_bytes) if without else 0
        costs = (whole.step_seconds - without.step_seconds) if without else 0.0
        if saves <= 0 and costs >= 0:
            why = "plan.why_nothing"
        elif costs <= 0:
            why = "plan.why_free"
        else:
            why = "plan.why_pays"
        found.append(
            Choice(
                name=strategy.name,
                options=strategy.options(),
                fidelity=strategy.fidelity,
                saves_bytes=saves,
                costs_seconds=costs,
                fixed=strategy in fixed,
                why=say(why, title=title(strategy.name), saves=max(saves, 0), costs=abs(costs)),
            )  # fmt: skip
        )
    return tuple(found)


def rejected(
    simulations: Simulations, situation: Situation, entries: Entries, profile: Profile,
    kinds: Sequence[type[Strategy]], allow: Sequence[str],
) -> tuple[Rejected, ...]:  # fmt: skip
    """Every strategy of the shelf that the plan goes without, and why."""
    taken = {s.name for s in entries}
    found: list[Rejected] = []
    for kind in kinds:
        if kind.name in taken:
            continue
        missing = kind.needs - situation.capabilities
        options = list(kind.worth_trying(situation))
        if missing:
            found.append(
                Rejected(
                    name=kind.name, options={}, why=say("plan.not_needs", missing=", ".join(sorted(missing)))
                )
            )
        elif not options:
            found.append(Rejected(name=kind.name, options={}, why=say("plan.not_offered")))
        else:
            found.append(_added(simulations, entries, profile, options[0], allow))
    return tuple(found)


def _added(
    simulations: Simulations, entries: Entries, profile: Profile, option: Strategy, allow: Sequence[str]
) -> Rejected:
    added = simulations.profile((*entries, option))
    figures: dict[str, Any] = {}
    if added is None:
        why = say("plan.not_together")
    else:
        saves, costs = profile.peak_bytes - added.peak_bytes, added.step_seconds - profile.step_seconds
        figures = {"peak_bytes": added.peak_bytes, "step_seconds": added.step_seconds}
        if option.fidelity == "lossy" and option.name not in allow:
            key = "plan.not_allowed"
        elif saves <= 0:
            key = "plan.not_saving"
        else:
            key = "plan.not_needed" if costs > 0 else "plan.not_needed_free"
        why = say(key, saves=max(saves, 0), costs=abs(costs), name=option.name, bound=option.bound,
                  sooner=say("plan.later" if costs > 0 else "plan.sooner"))  # fmt: skip
    return Rejected(name=option.name, options=option.options(), why=why, **figures)


def needs(
    simulations: Simulations, situation: Situation, best: Any, kinds: Sequence[type[Strategy]], allow: Sequence[str],
    budget_bytes: int,
) -> tuple[str, ...]:  # fmt: skip
    """What would make it fit: a permission that does, and the memory that the nearest plan asks for."""
    found: list[str] = []
    for kind in kinds:
        lossy = [c for c in kind.worth_trying(situation) if c.fidelity == "lossy"]
        if kind.name in allow or not lossy or any(s.name == kind.name for s in best.entries):
            continue
        profile = simulations.profile((*best.entries, lossy[0]))
        if profile is not None and profile.process_bytes < best.profile.process_bytes:
            key = "plan.permit_fits" if simulations.fits(profile) else "plan.permit_helps"
            found.append(say(key, name=kind.name, needed=profile.process_bytes))
    missing = best.profile.process_bytes - simulations.limit_bytes
    found.append(say("plan.more_memory", needed=budget_bytes + missing, missing=missing))
    if best.profile.process_bytes - best.profile.reserved_bytes > simulations.limit_bytes:
        found.append(
            say("plan.context_alone", context=best.profile.process_bytes - best.profile.reserved_bytes)
        )
    return tuple(found)


def questions(
    simulations: Simulations, baseline: Profile, entries: Entries, chosen: Profile, budget_bytes: int, fits: bool,
) -> tuple[Question, ...]:  # fmt: skip
    """The decision tree in plain words: what fills the plain run's peak, kind by kind, and what was done about it."""
    rows: list[Question] = []

    def ask(depth: int, key: str, answer: str, **figures: Any) -> None:
        rows.append(
            Question(asked=say(f"question.{key}"), answer=say(f"answer.{answer}", **figures), depth=depth)
        )

    over = baseline.process_bytes - simulations.limit_bytes
    ask(0, "fits", "fits" if over <= 0 else "over", needed=baseline.process_bytes, budget=budget_bytes, over=max(over, 0),
        phase=say(f"phase.{baseline.peak_at.phase}"), module=baseline.peak_at.module or "-")  # fmt: skip
    parts = baseline.breakdown()
    peak = max(baseline.peak_bytes, 1)
    groups = {
        "numbers": parts["weights"], "optimizer": parts["optimizer"] + parts["gradients"],
        "activations": parts["activations"], "temporaries": parts["temporaries"] + parts["workspace"],
    }  # fmt: skip
    targets = {"numbers": ("weights",), "optimizer": ("optimizer", "gradients"), "activations": ("activations",),
               "temporaries": ("temporaries",)}  # fmt: skip
    after = chosen.breakdown()
    for name, size in sorted(groups.items(), key=lambda item: -item[1]):
        ask(1, name, "share", size=size, share=size / peak)
        left = sum(after[k] for k in targets[name])
        helpers = [s.name for s in entries if any(t in s.targets for t in targets[name])]
        if helpers:
            ask(2, "helped", "helped", names=", ".join(helpers), before=size, after=left)
    ask(0, "result", "plan_fits" if fits else "plan_over", needed=chosen.process_bytes, budget=budget_bytes,
        seconds=chosen.step_seconds, plain=baseline.step_seconds, simulations=simulations.count)  # fmt: skip
    return tuple(rows)
