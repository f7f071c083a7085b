"""A recorded step as a plain sequence, and the carrying of few repeated blocks to the full depth.

A model of 40 equal layers is recorded with four. In the recording, the stretches of events that belong to an inner
layer are found by their path, checked to be the same for two inner layers (sizes, order, and who frees what,
relative to the layer), and repeated as often as the full depth asks. Where the check fails, :func:`expand` returns
None and the caller records the full depth: the short way is either equal to the long way or not taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

ALLOC, FREE, PHASE = 0, 1, 2
KEPT = 4  # first, two inner (compared with each other), last


@dataclass
class Storage:
    size: int
    kind: str
    place: str
    path: str
    op: str
    phase: str


@dataclass
class Trace:
    """``events``: (ALLOC, storage number, path), (FREE, storage number, path), (PHASE, name, "").
    ``seconds``: by (phase number, path)."""

    storages: list[Storage]
    events: list[tuple[int, int | str, str]]
    seconds: dict[tuple[int, str], float] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """Consecutive repeats inside a container: ``start`` is the first child's index in the recording, ``period``
    the children of one unit, ``kept`` the units recorded (``KEPT``), ``full`` those that the model has."""

    container: str
    start: int
    period: int
    kept: int
    full: int


def shift(path: str, container: str, delta: int) -> str:
    """The path with the container's child index moved by ``delta``."""
    if delta == 0 or not path.startswith(container + "."):
        return path
    head, _, rest = path[len(container) + 1 :].partition(".")
    moved = f"{container}.{int(head) + delta}"
    return f"{moved}.{rest}" if rest else moved


def child(path: str, container: str) -> int | None:
    """The index of the container's child that a path lies in."""
    if not path.startswith(container + "."):
        return None
    head = path[len(container) + 1 :].partition(".")[0]
    return int(head) if head.isdigit() else None


def expand(trace: Trace, run: Run) -> Trace | None:
    """The trace at full depth of one run, or None where inner units differ."""
    extra = run.full - run.kept
    if extra <= 0:
        return trace
    segments, place_of = _segments(trace, run)
    first, second = 1, 2
    if not _inner_units_agree(trace, run, segments, place_of, (first, second)):
        return None
    return _Writer(trace, run, segments, place_of, extra).write()


def _unit(path: str, run: Run) -> int | None:
    index = child(path, run.container)
    if index is None or not run.start <= index < run.start + run.period * run.kept:
        return None
    return (index - run.start) // run.period


def _attributed(trace: Trace, run: Run) -> list[tuple[int | None, bool]]:
    """For each event its unit, and whether it is so only because it frees that unit's storage from elsewhere.

    Such frees count to the unit where inner units have them too (an optimizer letting go of a list of temporaries);
    what only the first or last unit has (the last block's output, freed by the head) happens once, outside.
    """
    found: list[tuple[int | None, bool]] = []
    inner_phases: set[int] = set()
    phases: list[int] = []
    phase = 0
    for kind, number, path in trace.events:
        phase += kind == PHASE
        unit = None if kind == PHASE else _unit(path, run)
        elsewhere = unit is None and kind == FREE and child(path, run.container) is None
        if elsewhere:
            unit = _unit(trace.storages[number].path, run)  # type: ignore[index]
            if unit in (1, 2):
                inner_phases.add(phase)
        found.append((unit, elsewhere and unit is not None))
        phases.append(phase)
    return [
        (None, False)
        if by_storage and unit not in (1, 2) and phases[n] not in inner_phases
        else (unit, by_storage)
        for n, (unit, by_storage) in enumerate(found)
    ]


def _segments(
    trace: Trace, run: Run
) -> tuple[list[tuple[int | None, int, int]], dict[int, tuple[int, int, int]]]:
    """Maximal stretches of one unit: (unit, start, stop); and for each storage born inside a unit its place:
    (unit, how many stretches of that unit came before, position within the stretch)."""
    segments: list[tuple[int | None, int, int]] = []
    place_of: dict[int, tuple[int, int, int]] = {}
    seen = [0] * run.kept
    current: int | None = None
    start = 0
    units = _attributed(trace, run)
    for index, event in enumerate(trace.events):
        unit = units[index][0]
        if index == 0:
            current = unit
        elif unit != current or event[0] == PHASE:
            segments.append((current, start, index))
            if current is not None:
                seen[current] += 1
            current, start = unit, index
        if unit is not None and event[0] == ALLOC:
            place_of[event[1]] = (unit, seen[unit], index - start)  # type: ignore[index]
    segments.append((current, start, len(trace.events)))
    return segments, place_of


def _relative(
    trace: Trace, run: Run, place_of: dict[int, tuple[int, int, int]], unit: int, start: int, stop: int
) -> list[tuple]:
    """A stretch in terms that are equal for equal units."""
    rows: list[tuple] = []
    for kind, number, _ in trace.events[start:stop]:
        storage = trace.storages[number]  # type: ignore[index]
        if kind == ALLOC:
            rows.append((ALLOC, storage.size, storage.kind, storage.place, storage.op))
        else:
            place = place_of.get(number)  # type: ignore[arg-type]
            rows.append(
                (FREE, storage.size, number) if place is None else (FREE, place[0] - unit, *place[1:])
            )
    return rows


def _inner_units_agree(
    trace: Trace, run: Run, segments: list[tuple[int | None, int, int]],
    place_of: dict[int, tuple[int, int, int]], pair: tuple[int, int],
) -> bool:  # fmt: skip
    lists: dict[int, list[list[tuple]]] = {u: [] for u in pair}
    order: dict[int, list[int]] = {}
    for unit, start, stop in segments:
        if unit in lists:
            lists[unit].append(_relative(trace, run, place_of, unit, start, stop))  # type: ignore[index]
        if unit is not None:
            order.setdefault(unit, []).append(start)
    if lists[pair[0]] != lists[pair[1]]:
        return False
    # Every unit visits as many stretches, else "the same stretch of the next unit" means nothing.
    if len({len(v) for v in order.values()}) != 1 or len(order) != run.kept:
        return False
    fates: dict[int, list[tuple]] = {u: [] for u in pair}
    born = {number: place for number, place in place_of.items() if place[0] in pair}
    freed_in: dict[int, tuple] = {}
    for unit, start, stop in segments:
        for index in range(start, stop):
            kind, number, _ = trace.events[index]
            if kind == FREE and number in born:
                home = born[number][0]  # type: ignore[index]
                freed_in[number] = (
                    None if unit is None else unit - home,
                    index - start if unit is not None else -1,
                )  # type: ignore[index]
    for number, place in sorted(born.items(), key=lambda item: item[1]):
        fates[place[0]].append((place[1:], freed_in.get(number)))
    return fates[pair[0]] == fates[pair[1]]


class _Writer:
    """Writes the trace at full depth; storages of repeated units are new ones."""

    def __init__(self, trace: Trace, run: Run, segments: list[tuple[int | None, int, int]],
                 place_of: dict[int, tuple[int, int, int]], extra: int) -> None:  # fmt: skip
        self.trace, self.run, self.segments, self.place_of, self.extra = trace, run, segments, place_of, extra
        self.out = Trace(storages=[], events=[])
        self.absolute: dict[int, int] = {}
        self.placed: dict[tuple[int, int, int], int] = {}

    def write(self) -> Trace | None:
        seen = [0] * self.run.kept
        starts: dict[tuple[int, int], int] = {}
        for unit, start, _ in self.segments:
            if unit is not None:
                starts[unit, seen[unit]] = start
                seen[unit] += 1
        seen = [0] * self.run.kept
        for unit, start, stop in self.segments:
            if unit is None:
                for event in self.trace.events[start:stop]:
                    if not self._outside(event):
                        return None
                continue
            visit = seen[unit]
            seen[unit] += 1
            copies: Iterable[int]
            if unit == 1:
                ascending = starts[0, visit] < starts[2, visit]
                copies = range(1, 2 + self.extra) if ascending else range(1 + self.extra, 0, -1)
            else:
                copies = [0 if unit == 0 else unit + self.extra]
            for full_unit in copies:
                if not self._unit(unit, full_unit, visit, start, stop):
                    return None
        self._seconds()
        return self.out

    def _new(self, number: int, delta: int) -> int:
        old = self.trace.storages[number]
        self.out.storages.append(
            Storage(old.size, old.kind, old.place, self._moved(old.path, delta), old.op, old.phase)
        )
        return len(self.out.storages) - 1

    def _moved(self, path: str, delta: int) -> str:
        return shift(path, self.run.container, delta * self.run.period)

    def _outside(self, event: tuple[int, int | str, str]) -> bool:
        kind, number, path = event
        index = child(path, self.run.container) if path else None
        if index is not None and index >= self.run.start + self.run.period * self.run.kept:
            path = self._moved(path, self.extra)
        if kind == ALLOC:
            self.absolute[number] = self._new(number, 0)  # type: ignore[index,arg-type]
            storage = self.out.storages[-1]
            after = child(storage.path, self.run.container)
            if after is not None and after >= self.run.start + self.run.period * self.run.kept:
                storage.path = self._moved(storage.path, self.extra)
            self.out.events.append((ALLOC, self.absolute[number], path))  # type: ignore[index]
        elif kind == FREE:
            place = self.place_of.get(number)  # type: ignore[arg-type]
            if place is not None:
                if place[0] in (1, 2):
                    return False  # an inner unit's storage freed outside of all units
                target = self.placed[place[0] + (self.extra if place[0] else 0), place[1], place[2]]
            else:
                target = self.absolute[number]  # type: ignore[index]
            self.out.events.append((FREE, target, path))
        else:
            self.out.events.append(event)
        return True

    def _unit(self, unit: int, full_unit: int, visit: int, start: int, stop: int) -> bool:
        delta = full_unit - unit
        for index in range(start, stop):
            kind, number, path = self.trace.events[index]
            path = self._moved(path, delta)
            if kind == ALLOC:
                new = self._new(number, delta)  # type: ignore[arg-type]
                self.placed[full_unit, visit, index - start] = new
                self.out.events.append((ALLOC, new, path))
                continue
            place = self.place_of.get(number)  # type: ignore[arg-type]
            if place is None:
                if number not in self.absolute or (unit == 1 and self.extra):
                    return False  # freed once per unit, born once outside: cannot be repeated
                target = self.absolute[number]  # type: ignore[index]
            else:
                key = (full_unit + place[0] - unit, place[1], place[2])
                if key not in self.placed:
                    return False
                target = self.placed[key]
            self.out.events.append((FREE, target, path))
        return True

    def _seconds(self) -> None:
        for (phase, path), seconds in self.trace.seconds.items():
            unit = _unit(path, self.run)
            if unit is None:
                index = child(path, self.run.container)
                beyond = index is not None and index >= self.run.start + self.run.period * self.run.kept
                self._add(phase, self._moved(path, self.extra) if beyond else path, seconds)
            elif unit == 1:
                for full_unit in range(1, 2 + self.extra):
                    self._add(phase, self._moved(path, full_unit - 1), seconds)
            else:
                self._add(phase, path if unit == 0 else self._moved(path, self.extra), seconds)

    def _add(self, phase: int, path: str, seconds: float) -> None:
        self.out.seconds[phase, path] = self.out.seconds.get((phase, path), 0.0) + seconds
