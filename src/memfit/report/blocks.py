"""Bars and the memory timeline from block characters, for any terminal and for plain text files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from memfit.core.profile import Profile
from memfit.report import palette
from memfit.report.figures import FAR, Scale, Words, beside, merged_phases, needed

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_LEFT_EIGHTHS = " ▏▎▍▌▋▊▉█"


def plain(console: Console) -> bool:
    """Whether the output's encoding has no block characters."""
    return console.options.ascii_only


def bar(share: float, width: int, colour: str, *, ascii_only: bool = False) -> Text:
    """A horizontal bar of ``share`` of ``width`` cells, to an eighth of a cell."""
    share = min(1.0, max(0.0, share))
    if ascii_only:
        return Text(("#" * round(share * width)).ljust(width), style=colour)
    full, part = divmod(round(share * width * 8), 8)
    if share > 0 and full == part == 0:
        part = 1
    return Text(("█" * full + (_LEFT_EIGHTHS[part] if part else "")).ljust(width), style=colour)


def stacked_bar(
    sizes: Mapping[str, int], top: float, width: int, *, mark: float | None = None, ascii_only: bool = False
) -> Text:
    """Kinds side by side on one line; ``width`` cells stand for ``top`` bytes, ``mark`` is the budget."""
    text = Text()
    filled, total = 0, 0
    position = None if mark is None else min(width - 1, round(mark / top * width))
    for kind, size in sizes.items():
        total += size
        cells = min(width, round(total / top * width)) - filled
        colour = palette.COLOURS.get(kind, palette.BESIDE)
        character = "#" if ascii_only else "█" if kind in palette.COLOURS else "▒"
        text.append(character * cells, style=colour)
        filled += cells
    text.append(("." if ascii_only else "·") * (width - filled), style="bright_black")
    if position is not None:
        cut = text.divide([position, position + 1])
        over = position < filled
        line = Text("|" if ascii_only else "┃", style=f"bold {palette.BAD if over else 'default'}")
        text = Text.assemble(cut[0], line, cut[2] if len(cut) > 2 else Text())
    return text


def legend(kinds: Sequence[str], w: Words, width: int, *, ascii_only: bool = False) -> list[Text]:
    """Which colour is which kind, in lines of at most ``width`` cells that part no name from its colour."""
    lines = [Text()]
    for kind in kinds:
        name = w("beside") if kind == "beside" else w.of("kind", kind)
        entry = Text("#" if ascii_only else "▒" if kind == "beside" else "■", style=colour_of(kind))
        entry.append(f" {name}", style="default")
        if lines[-1] and cell_len(lines[-1].plain) + 2 + cell_len(entry.plain) > width:
            lines.append(Text())
        lines[-1] = Text.assemble(lines[-1], "  " if lines[-1] else "", entry)
    return lines


def colour_of(kind: str) -> str:
    return palette.COLOURS.get(kind, palette.BESIDE)


def timeline(
    profile: Profile,
    budget_bytes: int,
    scale: Scale,
    w: Words,
    *,
    width: int,
    height: int = 9,
    ascii_only: bool = False,
) -> list[Text]:
    """Memory over the step, stacked by kind, with what the process holds beside tensors at the bottom and the
    budget as a line; the lines of the chart from top to bottom, its axis and its phases."""
    axis, series = profile.curves(points=400)
    if not axis or profile.length <= 0:
        return []
    base, need = beside(profile), needed(profile)
    budget = budget_bytes if budget_bytes <= FAR * need else None
    top = max(need, budget or 0) * 1.02
    gutter = max(cell_len(scale.number(v)) for v in (top, need)) + 2
    columns = max(10, width - gutter)
    levels = _columns(axis, series, profile.length, columns)
    budget_row = None if budget is None else min(height - 1, int(budget / top * height))
    lines = []
    for row in reversed(range(height)):
        low, high = row * top / height, (row + 1) * top / height
        number = (
            budget
            if row == budget_row and budget
            else high
            if row == height - 1
            else low
            if row == 0
            else None
        )
        label = "" if number is None else scale.number(number)
        line = Text(
            label.rjust(gutter - 2) + (" +" if ascii_only else " ┤" if label else " │"), style="bright_black"
        )
        for level in levels:
            line.append(*_cell(level, base, low, high, row == budget_row, budget, ascii_only))
        lines.append(line)
    corner, dash, divider = ("+", "-", "|") if ascii_only else ("└", "─", "╵")
    lines.append(Text(" " * (gutter - 1) + corner + dash * columns, style="bright_black"))
    lines.append(_phase_line(profile, w, gutter, columns, divider))
    return lines


def _columns(
    axis: list[int], series: dict[str, list[int]], length: int, columns: int
) -> list[dict[str, int]]:
    """The largest level within each column; a column without events holds its neighbour's level."""
    levels: list[dict[str, int]] = []
    at, last = 0, dict.fromkeys(palette.STACK, 0)
    for column in range(columns):
        stop = (column + 1) * length / columns
        best: dict[str, int] | None = None
        while at < len(axis) and axis[at] < stop:
            last = {k: series[k][at] for k in palette.STACK}
            if best is None or sum(last.values()) > sum(best.values()):
                best = last
            at += 1
        levels.append(best or last)
    return levels


def _cell(
    level: dict[str, int],
    base: int,
    low: float,
    high: float,
    on_budget: bool,
    budget: int | None,
    ascii_only: bool,
) -> tuple[str, str]:
    total = base + sum(level.values())
    filled = (min(total, high) - low) / (high - low)
    if filled <= 0.06:
        return ("=" if ascii_only else "╌", f"bold {palette.WARN}") if on_budget else (" ", "")
    middle = (low + min(total, high)) / 2
    kind, reached = "beside", float(base)
    for name, size in level.items():
        if middle < reached:
            break
        if size:
            kind, reached = name, reached + size
    if ascii_only:
        return ("=" if on_budget and filled < 1 else "!" if budget and middle > budget else "#", "")
    style = colour_of(kind)
    if budget is not None and middle > budget:
        return ("▓", palette.BAD)
    if filled < 0.94:
        if on_budget:
            return (_EIGHTHS[max(1, round(filled * 8))], f"{style} underline" if filled < 0.3 else style)
        return (_EIGHTHS[max(1, round(filled * 8))], style)
    return ("░" if kind == "beside" else "█", style)


def _phase_line(profile: Profile, w: Words, gutter: int, columns: int, divider: str) -> Text:
    """The phases' names under the stretches that they take, where there is room."""
    line = Text(" " * gutter, style="bright_black")
    cell = 0
    for phase in merged_phases(profile):
        start = round(phase.start / profile.length * columns)
        stop = round(phase.stop / profile.length * columns)
        name = divider * bool(start) + w.of("phase", phase.name)
        if start < cell or stop - start < cell_len(name) + 1:
            continue
        line.append(" " * (start - cell) + name)
        cell = start + cell_len(name)
    return line
