"""What every report shows, worked out once: scales, shares, the tree of modules, figures in words."""

from __future__ import annotations

import math
import string
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memfit.core import words
from memfit.core.device import Device
from memfit.core.plan import Plan, Question
from memfit.core.profile import KINDS, Phase, Profile
from memfit.core.units import GIB, MIB, show_seconds

FAR = 3.0
"""A budget beyond this multiple of the need would flatten a chart; it is then named, not drawn."""


class Words:
    """The report's messages in one language: ``w("plan.title")`` is the message ``report.plan.title``."""

    def __init__(self, lang: str | None = None, device: Device | str = "") -> None:
        self.lang = lang or words.language()
        on_cpu = device.is_cpu if isinstance(device, Device) else "cpu" in device.lower()
        # Chinese has a word of its own for the memory of an accelerator.
        self.memory = words.say(f"report.memory.{'cpu' if on_cpu else 'device'}", lang=self.lang)

    def __call__(self, key: str, /, **figures: Any) -> str:
        return words.say(f"report.{key}", lang=self.lang, memory=self.memory, **figures)

    def of(self, table: str, name: str) -> str:
        """A word of a table (``kind``, ``phase``, ``report.column`` …); an unknown name is itself."""
        for key in (f"{table}.{name}", f"report.{table}.{name}"):
            if words.has(key):
                return words.say(key, lang=self.lang)
        return clean(name)

    def told(self, text: str, figures: Mapping[str, Any] | None = None) -> tuple[str, set[str]]:
        """A text or message key in words, and the names of the figures that went into it."""
        figures = figures or {}
        if not words.has(text):
            return clean(text), set()
        template = words.catalogue("en")[text]
        used = {f for _, f, _, _ in string.Formatter().parse(template) if f}
        if not used <= set(figures):
            return clean(text), set()
        return words.say(text, lang=self.lang, **figures), used

    def figure(self, name: str, value: Any) -> tuple[str, str]:
        """A figure with a unit in its name (``peak_bytes``, ``step_seconds``) as its label and its value."""
        stem = name
        for suffix in ("_bytes", "_seconds", "_share", "_error"):
            stem = stem.removesuffix(suffix)
        label = self.of("report.figure", stem)
        if label == clean(stem):
            label = label.replace("_", " ")
        return label, show_value(name, value)

    def rest(self, question: Question, used: set[str]) -> list[tuple[str, str]]:
        return [self.figure(k, v) for k, v in question.figures.items() if k not in used]


def clean(text: Any) -> str:
    """Text from outside without control characters: a module's name must not steer a terminal."""
    return "".join(
        " " if c in "\n\t" else c for c in str(text) if c in "\n\t" or unicodedata.category(c) != "Cc"
    )


def show_value(name: str, value: Any) -> str:
    """A value by the unit that its name ends with."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return clean(value)
    if not math.isfinite(value):
        return "–"
    if name == "bytes" or name.endswith("_bytes"):
        return scale_for(value).show(value)
    if name == "seconds" or name.endswith("_seconds"):
        return duration(value)
    if name.endswith(("_share", "_error")):
        return percent(value)
    return (
        f"{value:,}"
        if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15)
        else f"{value:.3g}"
    )


def duration(seconds: float) -> str:
    """Seconds for people, a negative number included."""
    return f"−{show_seconds(-seconds)}" if seconds < 0 else show_seconds(seconds)


def signed(text: str) -> str:
    return text if text.startswith(("−", "-")) else f"+{text}"


def percent(share: float | None, *, sign: bool = False, digits: int = 1) -> str:
    if share is None or not math.isfinite(share):
        return "–"
    return f"{100 * share:{'+' if sign else ''}.{digits}f} %".replace("-", "−")


class Scale(NamedTuple):
    """One unit for a whole table or chart, so that its figures align and compare."""

    divisor: int
    unit: str
    digits: int

    def number(self, size: float) -> str:
        text = f"{size / self.divisor:.{self.digits}f}"
        if size > 0 and float(text) == 0:
            return f"<{10.0**-self.digits:.{self.digits}f}"
        return text.replace("-", "−")

    def show(self, size: float) -> str:
        return f"{self.number(size)} {self.unit}"


def scale_for(*sizes: float | None) -> Scale:
    """GiB from 0.1 GiB on, MiB below, judged by the largest of ``sizes``."""
    top = max((abs(s) for s in sizes if s is not None), default=0)
    if top >= 0.1 * GIB:
        return Scale(GIB, "GiB", 2 if top >= GIB else 3)
    return Scale(MIB, "MiB", 1 if top >= 10 * MIB else 2 if top >= MIB else 4)


def device_title(device: Device | str) -> str:
    return clean(device) if isinstance(device, str) else clean(device.title or device.name)


def options_text(options: Mapping[str, Any]) -> str:
    return " ".join(
        f"{clean(k)}={clean(str(v).lower() if isinstance(v, bool) else v)}" for k, v in options.items()
    )


def entry_text(entry: Mapping[str, Any]) -> str:
    """A ``[[strategy]]`` table on one line."""
    options = options_text({k: v for k, v in entry.items() if k != "name"})
    return f"{clean(entry.get('name', ''))} {options}".strip()


def entries_text(entries: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(entry_text(e) for e in entries) or "–"


def needed(profile: Profile) -> int:
    """What is judged against the budget: the whole process where it is known."""
    return profile.process_bytes or profile.peak_bytes


def beside(profile: Profile) -> int:
    """What the process holds beside the tensors at the peak (context, libraries, the allocator's reserve)."""
    return max(0, profile.process_bytes - profile.peak_bytes)


def peak_place(profile: Profile, w: Words) -> str:
    at = profile.peak_at
    return " · ".join(
        p for p in (w.of("phase", at.phase) if at.phase else "", clean(at.module), clean(at.op)) if p
    )


class KindRow(NamedTuple):
    kind: str
    size: int
    share: float


def kinds_at_peak(profile: Profile) -> list[KindRow]:
    """What fills the peak, the largest first; kinds with nothing left out."""
    found = profile.breakdown()
    total = sum(found.values()) or 1
    rows = [KindRow(k, found[k], found[k] / total) for k in KINDS if found[k]]
    return sorted(rows, key=lambda r: -r.size)


def merged_phases(profile: Profile) -> list[Phase]:
    """Phases in order, neighbours of one name joined."""
    joined: list[Phase] = []
    for p in profile.phases:
        if joined and joined[-1].name == p.name:
            q = joined.pop()
            p = Phase(
                name=p.name,
                start=q.start,
                stop=p.stop,
                peak_bytes=max(q.peak_bytes, p.peak_bytes),
                end_bytes=p.end_bytes,
                seconds=q.seconds + p.seconds,
            )
        joined.append(p)
    return joined


@dataclass
class _Branch:
    kinds: dict[str, int] = field(default_factory=dict)
    children: dict[str, _Branch] = field(default_factory=dict)
    count: int = 1
    largest: str = ""

    @property
    def size(self) -> int:
        return sum(self.kinds.values())

    def add(self, kinds: Mapping[str, int]) -> None:
        for kind, size in kinds.items():
            self.kinds[kind] = self.kinds.get(kind, 0) + size


class ModuleRow(NamedTuple):
    """One line of the tree of modules. ``joined``: how many numbered siblings stand in it."""

    depth: int
    name: str
    size: int
    share: float
    kinds: dict[str, int]
    joined: int
    largest: str


def module_rows(profile: Profile, *, depth: int = 4, least: float = 0.01) -> list[ModuleRow]:
    """What fills the peak by module, as an indented list, the largest first. Numbered siblings (the repeated
    layers) stand together in one line; lines below ``least`` of the peak are gathered at their parent's end
    under the name ``"…"``, so that the lines of a level add up."""
    root = _Branch()
    for path, kinds in profile.by_module(depth=64).items():
        node = root
        node.add(kinds)
        for part in path.split("."):
            node = node.children.setdefault(part, _Branch())
            node.add(kinds)
    total = root.size or 1
    rows: list[ModuleRow] = []

    def walk(children: dict[str, _Branch], level: int) -> None:
        small = _Branch(count=0)
        for name, child in sorted(_gathered(children).items(), key=lambda item: -item[1].size):
            if child.size < least * total:
                small.add(child.kinds)
                small.count += child.count
                continue
            name, child = _shortened(name, child)
            rows.append(
                ModuleRow(
                    level,
                    clean(name),
                    child.size,
                    child.size / total,
                    child.kinds,
                    child.count,
                    child.largest,
                )
            )
            if level + 1 < depth:
                walk(child.children, level + 1)
        if small.size and level == 0:
            rows.append(ModuleRow(level, "…", small.size, small.size / total, small.kinds, small.count, ""))

    walk(root.children, 0)
    return rows


def _gathered(children: dict[str, _Branch]) -> dict[str, _Branch]:
    """The children with three or more numbered siblings joined into one."""
    numbered = sorted((n for n in children if n.isdecimal()), key=int)
    if len(numbered) < 3:
        return children
    joined = _Branch(count=len(numbered), largest=max(numbered, key=lambda n: children[n].size))
    for name in numbered:
        _join(joined, children[name])
    rest = {n: c for n, c in children.items() if n not in numbered}
    return {f"{numbered[0]}–{numbered[-1]}": joined, **rest}


def _join(into: _Branch, other: _Branch) -> None:
    into.add(other.kinds)
    for name, child in other.children.items():
        _join(into.children.setdefault(name, _Branch()), child)


def _shortened(name: str, node: _Branch) -> tuple[str, _Branch]:
    """``model`` with nothing but ``layers`` in it is ``model.layers``."""
    while node.count == 1:
        gathered = _gathered(node.children)
        if len(gathered) != 1:
            break
        ((child_name, child),) = gathered.items()
        if child.size < node.size:
            break
        name, node = f"{name}.{child_name}", child
    return name, node


def chosen_point(plan: Plan) -> int | None:
    """Which point of the frontier the plan is."""
    for number, point in enumerate(plan.frontier):
        if point.strategies == plan.strategies:
            return number
    for number, point in enumerate(plan.frontier):
        if (point.process_bytes, point.step_seconds) == (
            plan.profile.process_bytes,
            plan.profile.step_seconds,
        ):
            return number
    return None


def ticks(top: float, count: int = 4) -> list[float]:
    """Round values from zero up to ``top``, about ``count`` of them (steps of 1, 2 or 5)."""
    if top <= 0:
        return [0.0]
    raw = top / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    return [step * i for i in range(math.floor(top / step + 1e-9) + 1)]
