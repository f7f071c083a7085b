"""One self-contained HTML page: everything inline, nothing fetched, readable without a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memfit.core.device import Device
from memfit.core.plan import Plan, Verdict
from memfit.core.profile import KINDS, Profile
from memfit.report import charts, palette
from memfit.report.figures import (
    FAR,
    Scale,
    Words,
    chosen_point,
    clean,
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
from memfit.report.json import dumps_for_script

_HERE = Path(__file__).parent


def write_page(
    path: str | Path,
    *,
    plan: Plan | None = None,
    profile: Profile | None = None,
    budget_bytes: int | None = None,
    device: Device | str | None = None,
    measured: Profile | None = None,
    verdict: Verdict | None = None,
    losses: Sequence[float] | None = None,
    job_text: str | None = None,
    environment: Mapping[str, Any] | None = None,
    lang: str | None = None,
) -> Path:
    """Write the report of an estimate (``profile``), a plan, or a run (a plan or profile, and ``measured``).

    ``budget_bytes`` and ``device`` default to the plan's own. Names and texts are escaped: they may come from
    anywhere. Returns the path.
    """
    text = render_page(
        plan=plan, profile=profile, budget_bytes=budget_bytes, device=device, measured=measured,
        verdict=verdict, losses=losses, job_text=job_text, environment=environment, lang=lang,
    )  # fmt: skip
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def render_page(
    *,
    plan: Plan | None = None,
    profile: Profile | None = None,
    budget_bytes: int | None = None,
    device: Device | str | None = None,
    measured: Profile | None = None,
    verdict: Verdict | None = None,
    losses: Sequence[float] | None = None,
    job_text: str | None = None,
    environment: Mapping[str, Any] | None = None,
    lang: str | None = None,
) -> str:
    """The page of :func:`write_page` as text."""
    import jinja2
    from markupsafe import Markup

    predicted = plan.profile if plan is not None and profile is None else profile
    if predicted is None:
        raise ValueError("a page needs a plan or a profile")
    if budget_bytes is None:
        if plan is None:
            raise ValueError("a page without a plan needs budget_bytes")
        budget_bytes = plan.budget_bytes
    device = device if device is not None else plan.device if plan is not None else ""
    w = Words(lang, device)
    scale = scale_for(needed(predicted), budget_bytes if budget_bytes <= FAR * needed(predicted) else None)
    top = charts.timeline_top(budget_bytes, predicted, measured)
    timelines = [
        (w.of("origin", p.origin), p.origin, chart)
        for p in (predicted, measured)
        if p is not None and (chart := charts.timeline(p, budget_bytes, top, scale, w)) is not None
    ]
    loss = charts.losses(losses, w) if losses is not None else None
    moving = {f"timeline-{origin}": chart.data for _, origin, chart in timelines}
    if loss is not None:
        moving["loss"] = loss.data
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return pages.get_template("page.html").render(
        w=w,
        lang="zh-Hans" if w.lang == "zh" else "en",
        palette=palette,
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((_HERE / "page.js").read_text(encoding="utf-8")),
        data=Markup(dumps_for_script(moving)),
        title=_title(plan, w),
        subtitle=_subtitle(plan, device, w),
        hero=_hero(plan, predicted, measured, verdict, budget_bytes, device, w),
        stats=_stats(plan, measured or predicted, w),
        timelines=timelines,
        budget_far=budget_bytes > top,
        budget=scale.show(budget_bytes),
        unit=scale.unit,
        legend=charts.shown_kinds([chart for _, _, chart in timelines]),
        verdict=_verdict(predicted, measured, verdict, scale, w),
        fill=_fill(predicted, plan.baseline if plan is not None else None, scale, w),
        modules=_modules(predicted, w),
        phases=_phases(predicted, w),
        plan=_plan(plan, w),
        frontier=charts.frontier(plan, _plan_scale(plan), w) if plan is not None else None,
        loss=loss,
        loss_smooth=loss is not None and len(loss.lines) > 1,
        assumptions=[w.told(a)[0] for a in predicted.assumptions],
        environment=_environment(environment, device, w),
        job_text=None if job_text is None else "\n".join(clean(line) for line in job_text.splitlines()),
        origin=w.of("origin", predicted.origin),
    )


def _title(plan: Plan | None, w: Words) -> str:
    return clean(plan.job.model.name) if plan is not None else w("page.title")


def _subtitle(plan: Plan | None, device: Device | str, w: Words) -> str:
    parts = [device_title(device)]
    if plan is not None:
        parts = [w(f"page.{plan.job.task.kind}"), plan.job.model.dtype, *parts]
    return " · ".join(p for p in parts if p)


def _hero(
    plan: Plan | None,
    predicted: Profile,
    measured: Profile | None,
    verdict: Verdict | None,
    budget: int,
    device: Device | str,
    w: Words,
) -> dict[str, Any]:
    """The answer. A measurement, where there is one, speaks before the prediction."""
    shown = measured if measured is not None else predicted
    need = needed(shown)
    if verdict is not None:
        need = verdict.measured_process_bytes or verdict.measured_peak_bytes
    fits = verdict.within_budget if verdict is not None else need <= budget
    if plan is not None and measured is None:
        fits = plan.fits
    scale = scale_for(need, budget if budget <= FAR * need else None)
    key = "sentence_left" if need <= budget else "sentence_over"
    key = key.replace("sentence", "sentence_used") if measured is not None else key
    sizes = {**shown.breakdown(), "beside": max(0, need - shown.peak_bytes)}
    if not any(shown.breakdown().values()):
        sizes = {"beside": need}
    reach = max(need, budget if budget <= FAR * 4 * need else 0)
    answer = (
        ("verdict.within" if fits else "verdict.over")
        if measured is not None
        else "fits"
        if fits
        else "fits_not"
    )
    return {
        "fits": fits,
        "answer": w(answer),
        "sentence": w(key, need=scale.show(need), budget=scale.show(budget),
                      rest=scale.show(abs(budget - need)), device=device_title(device) or "–"),
        "origin": shown.origin,
        "origin_name": w.of("origin", shown.origin),
        "share": percent(need / budget),
        "need": scale.show(need),
        "budget": scale.show(budget),
        "parts": charts.bar_parts(sizes, reach * 1.04, w),
        "mark": 100 * budget / (reach * 1.04) if budget <= reach else None,
        "place": peak_place(shown, w),
    }  # fmt: skip


def _stats(plan: Plan | None, profile: Profile, w: Words) -> list[dict[str, str]]:
    baseline = plan.baseline if plan is not None and plan.choices else None
    rows = []
    for name in ("process", "peak", "reserved", "host_peak"):
        size = getattr(profile, f"{name}_bytes")
        if size:
            before = getattr(baseline, f"{name}_bytes") if baseline is not None else 0
            without = scale_for(before).show(before) if before else ""
            rows.append((w(f"stat.{name}"), scale_for(size).show(size), without, profile.uncertainty_peak))
    if profile.step_seconds:
        before = duration(baseline.step_seconds) if baseline is not None else ""
        rows.append((w("stat.step"), duration(profile.step_seconds), before, profile.uncertainty_seconds))
    predicted = profile.origin == "predicted"
    return [
        {
            "label": label,
            "value": value.rsplit(" ", 1)[0],
            "unit": value.rsplit(" ", 1)[1],
            "before": w("stat_without", value=before, origin=w.of("origin", "predicted")) if before else "",
            "unsure": f"± {percent(unsure, digits=0)}" if predicted else "",
            "origin": profile.origin,
            "origin_name": w.of("origin", profile.origin),
        }
        for label, value, before, unsure in rows
    ]


def _verdict(
    predicted: Profile, measured: Profile | None, verdict: Verdict | None, scale: Scale, w: Words
) -> dict[str, Any] | None:
    if measured is None:
        return None
    pairs = [("peak", predicted.peak_bytes, measured.peak_bytes)]
    if measured.process_bytes:
        pairs.append(("process", predicted.process_bytes, measured.process_bytes))
    one, other = predicted.breakdown(), measured.breakdown()
    reach = max(max(a, b) for _, a, b in pairs) or 1
    rows = [_pair(w(f"stat.{name}"), a, b, reach, scale) for name, a, b in pairs]
    kinds = []
    if any(one.values()) and any(other.values()):
        most = max(*one.values(), *other.values())
        kinds = [{**_pair(w.of("kind", k), one[k], other[k], most, scale), "colour": palette.COLOURS[k]}
                 for k in KINDS if one[k] or other[k]]  # fmt: skip
    seconds = None
    if predicted.step_seconds and measured.step_seconds:
        longest = max(predicted.step_seconds, measured.step_seconds)
        seconds = {
            "name": w("stat.step"),
            "predicted": duration(predicted.step_seconds),
            "measured": duration(measured.step_seconds),
            "predicted_width": 100 * predicted.step_seconds / longest,
            "measured_width": 100 * measured.step_seconds / longest,
            "error": percent(predicted.step_seconds / measured.step_seconds - 1, sign=True),
        }
    notes = []
    if verdict is not None and verdict.steps:
        notes.append(w("verdict.run", steps=verdict.steps, recoveries=verdict.recoveries))
    if verdict is not None and verdict.first_loss is not None and verdict.last_loss is not None:
        notes.append(w("verdict.loss", first=verdict.first_loss, last=verdict.last_loss))
    if verdict is not None and not verdict.loss_finite:
        notes.append(w("verdict.not_finite"))
    return {"rows": [*rows, *([seconds] if seconds else [])], "kinds": kinds, "notes": notes}


def _pair(name: str, predicted: int, measured: int, reach: int, scale: Scale) -> dict[str, Any]:
    return {
        "name": name,
        "predicted": scale.show(predicted),
        "measured": scale.show(measured),
        "predicted_width": 100 * predicted / reach,
        "measured_width": 100 * measured / reach,
        "error": percent(predicted / measured - 1, sign=True) if measured else "–",
    }


def _fill(profile: Profile, baseline: Profile | None, scale: Scale, w: Words) -> list[dict[str, Any]]:
    before = baseline.breakdown() if baseline is not None else {}
    rows = kinds_at_peak(profile)
    most = max((r.size for r in rows), default=1)
    return [
        {"name": w.of("kind", r.kind), "colour": palette.COLOURS[r.kind], "width": 100 * r.size / most,
         "size": scale.show(r.size), "share": percent(r.share),
         "before": scale.show(before[r.kind]) if before else ""}
        for r in rows
    ]  # fmt: skip


def _modules(profile: Profile, w: Words) -> list[dict[str, Any]]:
    scale = scale_for(profile.peak_bytes)
    return [
        {"name": w("others") if r.name == "…" else r.name or w("no_module"), "depth": r.depth,
         "parts": charts.bar_parts(r.kinds, profile.peak_bytes or 1, w), "size": scale.show(r.size),
         "share": percent(r.share), "joined": r.joined if r.joined > 1 else 0,
         "largest": w("fill.largest", name=clean(r.largest)) if r.largest else ""}
        for r in module_rows(profile, depth=4, least=0.01)[:40]
    ]  # fmt: skip


def _phases(profile: Profile, w: Words) -> list[tuple[str, str, str, str]]:
    found = profile.to_json(0)["phases"]
    scale = scale_for(*(p["peak_bytes"] for p in found))
    return [
        (w.of("phase", p["name"]), scale.show(p["peak_bytes"]), scale.show(p["end_bytes"]),
         duration(p["seconds"]) if p["seconds"] else "–")
        for p in found
    ]  # fmt: skip


def _plan_scale(plan: Plan) -> Scale:
    return scale_for(needed(plan.profile), needed(plan.baseline), *(p.process_bytes for p in plan.frontier))


def _plan(plan: Plan | None, w: Words) -> dict[str, Any] | None:
    if plan is None:
        return None
    scale = _plan_scale(plan)
    saves = scale_for(*(c.saves_bytes for c in plan.choices))
    before, after = plan.baseline, plan.profile
    compare = {"before": scale.show(needed(before)), "after": scale.show(needed(after))}
    if before.step_seconds and after.step_seconds:
        ratio = after.step_seconds / before.step_seconds
        compared = w("plan.compare", **compare, before_seconds=before.step_seconds,
                     after_seconds=after.step_seconds, ratio=ratio)  # fmt: skip
    else:
        compared = w("plan.compare_memory", **compare)
    chosen = chosen_point(plan)
    return {
        "compared": compared if plan.choices else "",
        "needs": [w.told(n)[0] for n in plan.needs],
        "choices": [
            {"name": clean(c.name), "options": options_text(c.options),
             "fidelity": w.of("report.fidelity", c.fidelity), "exact": c.fidelity == "exact",
             "fixed": c.fixed, "saves": saves.show(c.saves_bytes),
             "costs": signed(duration(c.costs_seconds)), "why": w.told(c.why)[0]}
            for c in plan.choices
        ],
        "rejected": [
            {"name": clean(r.name), "options": options_text(r.options), "why": w.told(r.why)[0],
             "peak": "–" if r.peak_bytes is None else scale.show(r.peak_bytes),
             "seconds": "–" if r.step_seconds is None else duration(r.step_seconds)}
            for r in plan.rejected
        ],
        "questions": _questions(plan, w),
        "frontier": [
            {"need": scale.show(p.process_bytes), "seconds": duration(p.step_seconds), "chosen": n == chosen,
             "fits": p.process_bytes <= plan.budget_bytes,
             "strategies": entries_text(p.strategies) if p.strategies else w("as_given")}
            for n, p in enumerate(plan.frontier)
        ],
        "unit": scale.unit,
        "search": w("plan.search", count=plan.simulations, seconds=plan.seconds) if plan.simulations else "",
    }  # fmt: skip


def _questions(plan: Plan, w: Words) -> list[dict[str, Any]]:
    """The decision tree as nested lists."""
    trunk: list[dict[str, Any]] = []
    levels = [trunk]
    for question in plan.questions:
        asked, used = w.told(question.asked, question.figures)
        answer, more = w.told(question.answer, question.figures)
        node: dict[str, Any] = {
            "asked": asked,
            "answer": answer,
            "figures": w.rest(question, used | more),
            "below": [],
        }
        del levels[max(1, min(question.depth + 1, len(levels))) :]
        levels[-1].append(node)
        levels.append(node["below"])
    return trunk


def _environment(
    environment: Mapping[str, Any] | None, device: Device | str, w: Words
) -> list[tuple[str, str]]:
    rows = {"device": device_title(device), **(environment or {})}
    return [(w.of("report.environment", k), clean(v)) for k, v in rows.items() if v not in (None, "")]
