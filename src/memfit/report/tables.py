"""The terminal's tables: one look for all of them, and the catalogues (devices, models, strategies)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.core.device import Device
from memfit.core.units import GIB
from memfit.report.figures import Words, clean, show_value

_WIDEST = 110


def table(*columns: tuple[str, str]) -> Table:
    """A table with a rule under its head and nothing else; ``columns``: title, ``"left"`` or ``"right"``."""
    made = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 1),
        header_style="bright_black",
    )
    for title, side in columns:
        justify: JustifyMethod = "right" if side == "right" else "left"
        made.add_column(Text(title), justify=justify, no_wrap=side == "right", overflow="fold")
    return made


def heading(console: Console, words: str) -> None:
    console.print()
    console.print(Text(words, style="bold"))


def say_line(console: Console, text: Text, *, wrap: bool = True) -> None:
    console.print(
        Padding(text, (0, 0, 0, 1), expand=False), no_wrap=not wrap, overflow="fold" if wrap else "crop"
    )


def show_devices(
    devices: Iterable[Device], this: Device | str | None = None, console: Console | None = None
) -> None:
    """The catalogue of devices; ``this`` machine's own is marked."""
    console, w = console or Console(), Words()
    mine = this.name if isinstance(this, Device) else this
    listed = list(devices)
    if isinstance(this, Device) and all(d.name != mine for d in listed):
        listed.insert(0, this)
    heading(console, w("devices.title"))
    shown = table(
        ("", "left"),
        (w("column.name"), "left"),
        (w("column.architecture"), "left"),
        ("GiB", "right"),
        ("GB/s", "right"),
        ("TFLOP/s", "right"),
        (w("column.link"), "right"),
        (w("column.origin"), "left"),
    )
    mark = ">" if console.options.ascii_only else "▸"
    for d in listed:
        speed = max(d.flops.get("bfloat16", 0.0), d.flops.get("float16", 0.0)) or d.flops.get("float32", 0.0)
        shown.add_row(
            mark if d.name == mine else "",
            Text(clean(d.name)),
            Text(clean(d.architecture)),
            f"{d.memory_bytes / GIB:.1f}",
            f"{d.bandwidth / 1e9:,.0f}",
            f"{speed / 1e12:,.0f}" if speed >= 1e13 else f"{speed / 1e12:.2f}",
            f"{d.host_link / 1e9:.0f}" if d.host_link else "–",
            w.of("origin", d.origin),
            style="bold" if d.name == mine else "",
        )
    console.print(shown)
    say_line(console, Text(w("devices.note"), style="bright_black"))


def show_models(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """The catalogue of models: one mapping each, with one set of keys."""
    _show_rows("models", rows, console)


def show_strategies(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """The shelf of strategies: one mapping each, with one set of keys."""
    _show_rows("strategies", rows, console)


def _show_rows(catalogue: str, rows: Sequence[Mapping[str, Any]], console: Console | None) -> None:
    """Rows as a table: titles from the catalogue, values by the unit in the key, numbers to the right.
    Long text (the last column) gets the room that is left."""
    console, w = console or Console(), Words()
    heading(console, w(f"{catalogue}.title", count=len(rows)))
    if not rows:
        return
    keys = list(dict.fromkeys(key for row in rows for key in row))
    numeric = {
        k
        for k in keys
        if all(isinstance(r.get(k), int | float | None) for r in rows) and any(r.get(k) for r in rows)
    }
    shown = table(*((_title(k, w), "right" if k in numeric else "left") for k in keys))
    if "name" in keys:
        shown.columns[keys.index("name")].no_wrap = True
        shown.columns[keys.index("name")].style = "bold"
    for row in rows:
        shown.add_row(*(Text(_cell(k, row.get(k), w)) for k in keys))
    console.print(shown)


def _title(key: str, w: Words) -> str:
    return w.of("report.column", key).replace("_", " ")


def _cell(key: str, value: Any, w: Words) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return w("yes" if value else "no")
    if key == "parameters" and isinstance(value, int | float):
        for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
            if value >= size:
                return f"{value / size:.3g} {unit}"
    if isinstance(value, list | tuple | set | frozenset):
        table = {"targets": "kind", "fidelity": "report.fidelity"}.get(key)
        return ", ".join(w.of(table, str(v)) if table else clean(v) for v in value) or "–"
    if key == "fidelity":
        return w.of("report.fidelity", str(value))
    return show_value(key, value)
