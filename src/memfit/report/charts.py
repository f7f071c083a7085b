"""Charts as inline SVG in a box of 1000 × 1000 that the page stretches to its own size.

Text and points are HTML elements placed in per cent, so that nothing but areas and lines is stretched: charts
need no script, they print, and they read well on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.report import palette
from memfit.report.figures import (
    FAR,
    Scale,
    Words,
    beside,
    chosen_point,
    duration,
    entries_text,
    merged_phases,
    needed,
    percent,
    ticks,
)

BOX = 1000.0


class Label(NamedTuple):
    """Text at ``at`` per cent of an axis, ``width`` per cent long where it names a stretch."""

    at: float
    text: str
    width: float = 0.0


class Band(NamedTuple):
    kind: str
    name: str
    colour: str
    path: str


class Dot(NamedTuple):
    left: float
    bottom: float
    role: str  # "chosen" | "fits" | "over" | "baseline"
    text: str


@dataclass
class Chart:
    """What the page's template draws. Positions are per cent from the left and from the bottom."""

    rows: list[Label]
    columns: list[Label]
    bands: list[Band] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)  # class, path
    dots: list[Dot] = field(default_factory=list)
    base: float = 0.0
    budget: Label | None = None
    peak: Label | None = None
    peak_bottom: float = 0.0
    alt: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def timeline(profile: Profile, budget_bytes: int, top: float, scale: Scale, w: Words) -> Chart | None:
    """Memory over the step, stacked by kind over what the process holds beside its tensors."""
    axis, series = profile.curves(points=400)
    if not axis or profile.length <= 0:
        return None
    base = beside(profile)
    xs = [min(1.0, max(0.0, i / profile.length)) for i in axis]
    floor = [float(base)] * len(xs)
    bands = [Band("beside", w("beside"), palette.BESIDE, "")] if base else []
    for kind in palette.STACK:
        if not any(series[kind]):
            continue
        roof = [f + s for f, s in zip(floor, series[kind], strict=True)]
        bands.append(Band(kind, w.of("kind", kind), palette.COLOURS[kind], _area(xs, floor, roof, top)))
        floor = roof
    columns = [
        Label(
            100 * p.start / profile.length, w.of("phase", p.name), 100 * (p.stop - p.start) / profile.length
        )
        for p in merged_phases(profile)
    ]
    shown = needed(profile)
    chart = Chart(rows=_rows(top, scale), columns=columns, bands=bands, base=100 * base / top)
    chart.lines.append(("outline", _steps(xs, floor, top)))
    if budget_bytes <= top:
        chart.budget = Label(100 * budget_bytes / top, w("timeline.budget", budget=scale.show(budget_bytes)))
    peak_x = 100 * min(1.0, (profile.peak_index + 0.5) / profile.length)
    chart.peak = Label(peak_x, w("timeline.peak", size=scale.show(shown)))
    chart.peak_bottom = 100 * shown / top
    origin = w.of("origin", profile.origin)
    chart.alt = w("timeline.alt", origin=origin, peak=scale.show(shown), budget=scale.show(budget_bytes))
    chart.data = {
        "x": [round(x, 5) for x in xs],
        "phases": [[round(c.at / 100, 5), c.text] for c in columns],
        "series": [
            {
                "name": b.name,
                "colour": b.colour,
                "values": [
                    scale.number(v) for v in ([base] * len(xs) if b.kind == "beside" else series[b.kind])
                ],
            }
            for b in reversed(bands)
        ],
        "total": {"name": w("timeline.at"), "values": [scale.number(v) for v in floor]},
        "unit": scale.unit,
    }
    return chart


def shown_kinds(timelines: Sequence[Chart]) -> list[Band]:
    """The legend of one or more timelines."""
    found = {band.kind: band for chart in timelines for band in chart.bands}
    return [found[kind] for kind in ("beside", *palette.STACK) if kind in found]


def timeline_top(budget_bytes: int, *profiles: Profile | None) -> float:
    """The height of the chart in bytes: room for the need and, where it is not far above, for the budget."""
    need = max(needed(p) for p in profiles if p is not None)
    return 1.12 * max(need, budget_bytes if budget_bytes <= FAR * need else 0)


def frontier(plan: Plan, scale: Scale, w: Words) -> Chart | None:
    """Memory needed against seconds a step: every point that the search kept, the plan, the job as given."""
    if not plan.frontier:
        return None
    chosen = chosen_point(plan)
    points = [
        (p.process_bytes, p.step_seconds, entries_text(p.strategies), n) for n, p in enumerate(plan.frontier)
    ]
    if chosen is None:
        own = (needed(plan.profile), plan.profile.step_seconds, entries_text(plan.strategies), -1)
        points.append(own)
        chosen = -1
    if not any(not p.strategies for p in plan.frontier):
        points.append((needed(plan.baseline), plan.baseline.step_seconds, "", -2))
    far = max(p[0] for p in points)
    top = 1.1 * max(far, plan.budget_bytes if plan.budget_bytes <= FAR * far else 0)
    slowest = 1.12 * max(p[1] for p in points) or 1.0
    dots = []
    for size, seconds, strategies, number in points:
        baseline = number == -2 or (number >= 0 and not plan.frontier[number].strategies)
        role = "chosen" if number == chosen else "baseline" if baseline else ""
        role = role or ("fits" if size <= plan.budget_bytes else "over")
        what = w("frontier.baseline") if baseline else strategies
        text = f"{scale.show(size)} · {duration(seconds)} · {what}"
        dots.append(Dot(100 * size / top, 100 * seconds / slowest, role, text))
    chart = Chart(
        rows=[Label(100 * t / slowest, duration(t) if t else "0") for t in ticks(slowest)],
        columns=[Label(100 * t * scale.divisor / top, f"{t:g}") for t in ticks(top / scale.divisor, 5)],
        dots=sorted(dots, key=lambda d: d.role == "chosen"),
    )
    edge = sorted((d for d in dots if d.role != "baseline"), key=lambda d: d.left)
    chart.lines.append(("edge", _line([(d.left / 100, d.bottom / 100) for d in edge])))
    if plan.budget_bytes <= top:
        chart.budget = Label(
            100 * plan.budget_bytes / top, w("timeline.budget", budget=scale.show(plan.budget_bytes))
        )
    chart.alt = w("frontier.alt", count=len(plan.frontier), budget=scale.show(plan.budget_bytes))
    return chart


def losses(values: Sequence[float], w: Words) -> Chart | None:
    """The loss of each step, and a smoothed line where there are many steps; a NaN leaves a gap."""
    finite = [v for v in values if math.isfinite(v)]
    if len(finite) < 2:
        return None
    low, high = min(finite), max(finite)
    room = 0.08 * (high - low or abs(high) or 1.0)
    low, high = low - room, high + room
    count = len(values)
    stride = max(1, count // 1000)

    def place(step: int, value: float) -> tuple[float, float] | None:
        return (step / (count - 1), (value - low) / (high - low)) if math.isfinite(value) else None

    step = ticks(high - low)[1]
    levels = [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    chart = Chart(
        rows=[Label(100 * (v - low) / (high - low), f"{v:.4g}") for v in levels],
        columns=[Label(100 * t / (count - 1), f"{t:,.0f}") for t in ticks(count - 1, 5) if t == int(t)],
    )
    smooth = count >= 40
    chart.lines.append(
        ("raw" if smooth else "loss", _line([place(i, v) for i, v in enumerate(values)][::stride]))
    )
    if smooth:
        means = _moving_mean(values, max(2, count // 40))
        chart.lines.append(("loss", _line([place(i, v) for i, v in enumerate(means)][::stride])))
    chart.alt = w("loss.alt", count=count, first=finite[0], last=finite[-1])
    chart.data = {"x": [round(i / (count - 1), 5) for i in range(0, count, stride)], "unit": "",
                  "phases": [], "series": [],
                  "total": {"name": w("loss.heading"),
                            "values": [f"{v:.4f}" if math.isfinite(v) else "NaN" for v in values[::stride]]},
                  "labels": [f"{w('loss.step')} {i + 1:,}" for i in range(0, count, stride)]}  # fmt: skip
    return chart


def _moving_mean(values: Sequence[float], reach: int) -> list[float]:
    """The mean of each step and up to ``reach`` neighbours on either side (fewer at the ends, as many on both
    sides, so that the line does not lag); what is not finite does not count."""
    sums, counts = [0.0], [0]
    for v in values:
        sums.append(sums[-1] + (v if math.isfinite(v) else 0.0))
        counts.append(counts[-1] + math.isfinite(v))
    means = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        number = counts[i + near + 1] - counts[i - near]
        means.append((sums[i + near + 1] - sums[i - near]) / number if number else math.nan)
    return means


def bar_parts(kinds: dict[str, int], top: float, w: Words) -> list[dict[str, Any]]:
    """A bar of kinds side by side: width in per cent, colour and title of each part."""
    return [
        {
            "kind": kind,
            "name": w("beside") if kind == "beside" else w.of("kind", kind),
            "width": round(100 * kinds[kind] / top, 3),
            "colour": palette.COLOURS.get(kind, palette.BESIDE),
            "share": percent(kinds[kind] / top),
        }
        for kind in ("beside", *palette.STACK)
        if kinds.get(kind)
    ]


def _rows(top: float, scale: Scale) -> list[Label]:
    return [Label(100 * t * scale.divisor / top, f"{t:g}") for t in ticks(top / scale.divisor)]


def _corners(xs: list[float], ys: list[float], top: float) -> list[str]:
    """A line of steps: each level holds until the next one begins, the last until the end."""
    corners = [f"0 {BOX * (1 - ys[0] / top):.1f}"]
    for x, y in zip(xs[1:], ys[1:], strict=True):
        corners += [f"H{BOX * x:.1f}", f"V{BOX * (1 - y / top):.1f}"]
    return [*corners, f"H{BOX:.0f}"]


def _steps(xs: list[float], ys: list[float], top: float) -> str:
    return "M" + "".join(_corners(xs, ys, top))


def _area(xs: list[float], floor: list[float], roof: list[float], top: float) -> str:
    """The band between two lines of steps, out along the roof and back along the floor."""
    back = [f"V{BOX * (1 - floor[-1] / top):.1f}"]
    for i in range(len(xs) - 1, 0, -1):
        back += [f"H{BOX * xs[i]:.1f}", f"V{BOX * (1 - floor[i - 1] / top):.1f}"]
    return _steps(xs, roof, top) + "".join(back) + "H0Z"


def _line(points: Sequence[tuple[float, float] | None]) -> str:
    path, pen_down = [], False
    for point in points:
        if point is not None:
            path.append(f"{'L' if pen_down else 'M'}{BOX * point[0]:.1f} {BOX * (1 - point[1]):.1f}")
        pen_down = point is not None
    return "".join(path)
