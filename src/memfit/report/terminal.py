"""An estimate, a plan and a verdict in a terminal. Colour is decoration: a pipe loses nothing."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from memfit.core.device import Device
from memfit.core.plan import Plan, Verdict
from memfit.core.profile import KINDS, Profile
from memfit.report import blocks, palette
from memfit.report.figures import (
    FAR,
    Scale,
    Words,
    beside,
    chosen_point,
    device_title,
    duration,
    entries_text,
    kinds_at_peak,
    module_rows,
    needed,
    options_text,
    peak_place,
    percent,
    scale_for,
    signed,
)
from memfit.report.tables import heading, say_line, show_devices, show_models, show_strategies, table

__all__ = ["show_devices", "show_estimate", "show_models", "show_plan", "show_strategies", "show_verdict"]

_WIDEST = 110


def show_estimate(
    profile: Profile, budget_bytes: int, device: Device | str, console: Console | None = None
) -> None:
    """One profile against a budget: the answer, the figures, the timeline, what fills the peak."""
    console, w = console or Console(), Words(device=device)
    fits = needed(profile) <= budget_bytes
    _headline(console, w, profile, budget_bytes, device_title(device), fits)
    _figures(console, w, profile)
    _timeline(console, w, profile, budget_bytes)
    _fill(console, w, profile)
    _modules(console, w, profile)
    _phases(console, w, profile)
    _assumptions(console, w, profile)


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """A plan: the answer, what was chosen and why, how it was decided, what else there was."""
    console, w = console or Console(), Words(device=plan.device)
    _headline(console, w, plan.profile, plan.budget_bytes, device_title(plan.device), plan.fits)
    for need in plan.needs:
        say_line(
            console, Text(f"→ {w.told(need)[0]}" if not blocks.plain(console) else f"> {w.told(need)[0]}")
        )
    _figures(console, w, plan.profile, plan.baseline)
    _choices(console, w, plan)
    _timeline(console, w, plan.profile, plan.budget_bytes)
    _fill(console, w, plan.profile, plan.baseline)
    _modules(console, w, plan.profile)
    _phases(console, w, plan.profile)
    _questions(console, w, plan)
    _rejected(console, w, plan)
    _frontier(console, w, plan)
    _assumptions(console, w, plan.profile)
    if plan.simulations:
        say_line(
            console,
            Text(w("plan.search", count=plan.simulations, seconds=plan.seconds), style="bright_black"),
        )


def show_verdict(
    plan: Plan | Profile, measured: Profile, verdict: Verdict, console: Console | None = None
) -> None:
    """Prediction against measurement, after a run."""
    console, w = console or Console(), Words(device=plan.device if isinstance(plan, Plan) else "")
    predicted = plan.profile if isinstance(plan, Plan) else plan
    ours = verdict.measured_process_bytes or verdict.measured_peak_bytes
    scale = scale_for(ours, verdict.budget_bytes)
    _answer(console, verdict.within_budget, w("verdict.within" if verdict.within_budget else "verdict.over"))
    sentence = w("verdict.sentence", used=scale.show(ours), budget=scale.show(verdict.budget_bytes))
    say_line(console, Text(f"{sentence}  [{w.of('origin', measured.origin)}]"))
    heading(console, w("verdict.title"))
    figures = table(
        (w("column.figure"), "left"),
        (f"{w.of('origin', 'predicted')}", "right"),
        (f"{w.of('origin', 'measured')}", "right"),
        (w("column.error"), "right"),
    )
    for name, one, other, error in (
        ("peak", verdict.predicted_peak_bytes, verdict.measured_peak_bytes, verdict.peak_error),
        ("process", verdict.predicted_process_bytes, verdict.measured_process_bytes, verdict.process_error),
    ):
        shown = "–" if other is None else scale.show(other)
        figures.add_row(w(f"stat.{name}"), scale.show(one), shown, percent(error, sign=True))
    figures.add_row(
        w("stat.step"),
        duration(predicted.step_seconds),
        duration(measured.step_seconds) if measured.step_seconds else "–",
        percent(verdict.seconds_error, sign=True),
    )
    console.print(figures)
    _compared_kinds(console, w, predicted, measured)
    if verdict.steps:
        say_line(console, Text(w("verdict.run", steps=verdict.steps, recoveries=verdict.recoveries)))
    if verdict.first_loss is not None and verdict.last_loss is not None:
        say_line(console, Text(w("verdict.loss", first=verdict.first_loss, last=verdict.last_loss)))
    if not verdict.loss_finite:
        say_line(console, Text(w("verdict.not_finite"), style=f"bold {palette.BAD}"))
    _timeline(console, w, measured, verdict.budget_bytes)


def _answer(console: Console, good: bool, words: str) -> None:
    mark = ("OK" if good else "!!") if blocks.plain(console) else ("✔" if good else "✘")
    console.print()
    say_line(console, Text(f"{mark} {words}", style=f"bold {palette.GOOD if good else palette.BAD}"))


def _headline(console: Console, w: Words, profile: Profile, budget: int, device: str, fits: bool) -> None:
    need = needed(profile)
    scale = scale_for(need, budget)
    _answer(console, fits, w("fits" if fits else "fits_not"))
    key = "sentence_left" if need <= budget else "sentence_over"
    sentence = w(
        key,
        need=scale.show(need),
        budget=scale.show(budget),
        rest=scale.show(abs(budget - need)),
        device=device,
    )
    say_line(console, Text(f"{sentence}  [{w.of('origin', profile.origin)}]"))
    sizes = {"beside": beside(profile), **{k: profile.breakdown()[k] for k in palette.STACK}}
    if not profile.allocations:
        sizes = {"beside": need}
    width = min(console.width, _WIDEST) - 12
    top = max(need, budget if budget <= FAR * 4 * need else need * 1.02)
    mark = budget if budget <= top else None
    ascii_only = blocks.plain(console)
    line = blocks.stacked_bar(sizes, top * 1.02, width, mark=mark, ascii_only=ascii_only)
    say_line(console, Text.assemble(line, Text(f" {percent(need / budget)}", style="bold")))
    shown = [k for k, size in sizes.items() if size >= 0.005 * need]
    for line in blocks.legend(shown, w, console.width - 2, ascii_only=ascii_only):
        say_line(console, line)


def _figures(console: Console, w: Words, profile: Profile, baseline: Profile | None = None) -> None:
    """The figures of a profile, each with its origin; beside those without the plan, where there are any."""
    scale = scale_for(profile.process_bytes, profile.peak_bytes, baseline.process_bytes if baseline else None)
    heading(console, w("figures.title"))
    columns = [(w("column.figure"), "left"), (w("column.value"), "right")]
    if baseline is not None:
        columns = [(w("column.figure"), "left"), (w("column.without"), "right"), (w("column.with"), "right")]
    columns += [(w("column.uncertainty"), "right"), (w("column.origin"), "left")]
    figures = table(*columns)
    for name in ("peak", "reserved", "process", "host_peak"):
        size = getattr(profile, f"{name}_bytes")
        before = getattr(baseline, f"{name}_bytes") if baseline is not None else 0
        if not size and not before:
            continue
        values = [scale.show(before), scale.show(size)] if baseline is not None else [scale.show(size)]
        unsure = f"±{percent(profile.uncertainty_peak, digits=0)}" if profile.origin == "predicted" else ""
        figures.add_row(w(f"stat.{name}"), *values, unsure, w.of("origin", profile.origin))
    if profile.step_seconds:
        values = [duration(profile.step_seconds)]
        if baseline is not None:
            values = [duration(baseline.step_seconds), *values]
        unsure = f"±{percent(profile.uncertainty_seconds, digits=0)}" if profile.origin == "predicted" else ""
        figures.add_row(w("stat.step"), *values, unsure, w.of("origin", profile.origin))
    console.print(figures)
    place = peak_place(profile, w)
    if place:
        say_line(console, Text.assemble((w("peak_at"), "bright_black"), " ", place))


def _timeline(console: Console, w: Words, profile: Profile, budget: int) -> None:
    width = min(console.width, _WIDEST) - 3
    scale = scale_for(needed(profile), budget)
    lines = blocks.timeline(profile, budget, scale, w, width=width, ascii_only=blocks.plain(console))
    if not lines:
        return
    heading(console, w("timeline.title", unit=scale.unit, origin=w.of("origin", profile.origin)))
    for line in lines:
        say_line(console, line, wrap=False)
    far = budget > FAR * needed(profile)
    key = "timeline.budget_far" if far else "timeline.budget_line"
    say_line(console, Text(w(key, budget=scale.show(budget)), style="bright_black"))


def _fill(console: Console, w: Words, profile: Profile, baseline: Profile | None = None) -> None:
    rows = kinds_at_peak(profile)
    if not rows:
        return
    scale = scale_for(profile.peak_bytes, baseline.peak_bytes if baseline else None)
    heading(console, w("fill.title", origin=w.of("origin", profile.origin)))
    columns = [(w("column.kind"), "left"), ("", "left"), (scale.unit, "right"), (w("column.share"), "right")]
    if baseline is not None:
        columns.append((w("column.without_unit", unit=scale.unit), "right"))
    fill = table(*columns)
    before = baseline.breakdown() if baseline is not None else {}
    width = max(12, min(console.width, _WIDEST) - 58)
    ascii_only = blocks.plain(console)
    for row in rows:
        bar = blocks.bar(row.share, width, palette.COLOURS[row.kind], ascii_only=ascii_only)
        cells: list[Text | str] = [w.of("kind", row.kind), bar, scale.number(row.size), percent(row.share)]
        fill.add_row(*cells, *([scale.number(before[row.kind])] if before else []))
    for kind in KINDS:
        if before.get(kind) and not any(r.kind == kind for r in rows):
            fill.add_row(w.of("kind", kind), "", scale.number(0), percent(0.0), scale.number(before[kind]))
    total = sum(r.size for r in rows)
    cells = [w("total"), "", scale.number(total), percent(1.0)]
    fill.add_row(*cells, *([scale.number(sum(before.values()))] if before else []), style="bold")
    console.print(fill)


def _modules(console: Console, w: Words, profile: Profile) -> None:
    rows = module_rows(profile, depth=3, least=0.02)[:14]
    if not rows:
        return
    scale = scale_for(profile.peak_bytes)
    heading(console, w("modules.title", origin=w.of("origin", profile.origin)))
    modules = table(
        (w("column.module"), "left"), ("", "left"), (scale.unit, "right"), (w("column.share"), "right")
    )
    width = max(12, min(console.width, _WIDEST) - 58)
    for row in rows:
        name = Text("  " * row.depth + (w("others") if row.name == "…" else row.name or w("no_module")))
        if row.joined > 1:
            name.append(f"  ×{row.joined}", style="bright_black")
        bar = blocks.stacked_bar(
            {k: row.kinds[k] for k in palette.STACK if k in row.kinds},
            profile.peak_bytes,
            width,
            ascii_only=blocks.plain(console),
        )
        modules.add_row(name, bar, scale.number(row.size), percent(row.share))
    console.print(modules)


def _phases(console: Console, w: Words, profile: Profile) -> None:
    found = profile.to_json(0)["phases"]
    if not found:
        return
    scale = scale_for(*(p["peak_bytes"] for p in found))
    heading(console, w("phases.title", origin=w.of("origin", profile.origin)))
    phases = table(
        (w("column.phase"), "left"),
        (w("column.peak_unit", unit=scale.unit), "right"),
        (w("column.end_unit", unit=scale.unit), "right"),
        (w("column.time"), "right"),
    )
    for p in found:
        seconds = duration(p["seconds"]) if p["seconds"] else "–"
        phases.add_row(
            w.of("phase", p["name"]), scale.number(p["peak_bytes"]), scale.number(p["end_bytes"]), seconds
        )
    console.print(phases)


def _choices(console: Console, w: Words, plan: Plan) -> None:
    heading(console, w("plan.title", origin=w.of("origin", plan.profile.origin)))
    if not plan.choices:
        say_line(console, Text(w("plan.nothing")))
        return
    scale = scale_for(*(c.saves_bytes for c in plan.choices))
    choices = table(
        (w("column.strategy"), "left"),
        (w("column.saves_unit", unit=scale.unit), "right"),
        (w("column.costs"), "right"),
        (w("column.why"), "left"),
    )
    for c in plan.choices:
        name = Text(c.name, style="bold")
        if c.options:
            name.append(f"\n{options_text(c.options)}", style="not bold")
        notes = [w.of("report.fidelity", c.fidelity), *([w("fixed")] if c.fixed else [])]
        name.append("\n" + " · ".join(notes), style="not bold bright_black")
        choices.add_row(
            name, scale.number(c.saves_bytes), signed(duration(c.costs_seconds)), Text(w.told(c.why)[0])
        )
    console.print(choices)


def _questions(console: Console, w: Words, plan: Plan) -> None:
    if not plan.questions:
        return
    heading(console, w("questions.title"))
    trunk = Tree("", hide_root=True, guide_style="bright_black")
    nodes: list[Tree] = [trunk]
    for question in plan.questions:
        asked, used = w.told(question.asked, question.figures)
        answer, more = w.told(question.answer, question.figures)
        text = Text.assemble(asked, "  ", (answer, "bold"))
        figures = w.rest(question, used | more)
        if figures:
            text.append(
                "  " + ", ".join(f"{label} {value}" for label, value in figures), style="bright_black"
            )
        depth = min(question.depth, len(nodes) - 1)
        del nodes[depth + 1 :]
        nodes.append(nodes[depth].add(text))
    console.print(trunk)


def _rejected(console: Console, w: Words, plan: Plan) -> None:
    if not plan.rejected:
        return
    heading(console, w("rejected.title"))
    scale = scale_for(*(r.peak_bytes for r in plan.rejected))
    rejected = table(
        (w("column.strategy"), "left"),
        (w("column.peak_unit", unit=scale.unit), "right"),
        (w("column.time"), "right"),
        (w("column.why_not"), "left"),
    )
    for r in plan.rejected:
        name = Text(r.name)
        if r.options:
            name.append(f"\n{options_text(r.options)}", style="bright_black")
        peak = "–" if r.peak_bytes is None else scale.number(r.peak_bytes)
        seconds = "–" if r.step_seconds is None else duration(r.step_seconds)
        rejected.add_row(name, peak, seconds, Text(w.told(r.why)[0]))
    console.print(rejected)


def _frontier(console: Console, w: Words, plan: Plan) -> None:
    if not plan.frontier:
        return
    heading(console, w("frontier.title", origin=w.of("origin", plan.profile.origin)))
    scale = scale_for(*(p.process_bytes for p in plan.frontier))
    frontier = table(
        ("", "left"),
        (w("column.needs_unit", unit=scale.unit), "right"),
        (w("column.time"), "right"),
        (w("column.strategies"), "left"),
    )
    chosen, ascii_only = chosen_point(plan), blocks.plain(console)
    for number, point in enumerate(plan.frontier):
        mark = (">" if ascii_only else "▸") if number == chosen else ""
        style = (
            "bold" if number == chosen else "" if point.process_bytes <= plan.budget_bytes else "bright_black"
        )
        strategies = Text(entries_text(point.strategies) if point.strategies else w("as_given"))
        values = scale.number(point.process_bytes), duration(point.step_seconds)
        frontier.add_row(mark, *values, strategies, style=style)
    console.print(frontier)
    say_line(console, Text(w("frontier.note", budget=scale.show(plan.budget_bytes)), style="bright_black"))


def _compared_kinds(console: Console, w: Words, predicted: Profile, measured: Profile) -> None:
    one, other = predicted.breakdown(), measured.breakdown()
    if not any(one.values()) or not any(other.values()):
        return
    scale: Scale = scale_for(predicted.peak_bytes, measured.peak_bytes)
    heading(console, w("verdict.kinds", unit=scale.unit))
    kinds = table(
        (w("column.kind"), "left"),
        (w.of("origin", "predicted"), "right"),
        (w.of("origin", "measured"), "right"),
        (w("column.difference"), "right"),
    )
    for kind in KINDS:
        if one[kind] or other[kind]:
            difference = signed(scale.number(one[kind] - other[kind]))
            kinds.add_row(w.of("kind", kind), scale.number(one[kind]), scale.number(other[kind]), difference)
    console.print(kinds)


def _assumptions(console: Console, w: Words, profile: Profile) -> None:
    if not profile.assumptions:
        return
    heading(console, w("assumptions.title"))
    for assumption in profile.assumptions:
        text = Text.assemble(
            "- ", w.told(assumption)[0], "  ", (f"[{w.of('origin', 'assumed')}]", "bright_black")
        )
        say_line(console, text)
