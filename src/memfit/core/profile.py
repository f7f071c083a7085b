"""Profile: memory over time, whoever saw it. A prediction, a measurement and a trace read from disk are equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

KINDS = ("weights", "gradients", "optimizer", "activations", "temporaries", "inputs", "cache", "workspace")
PHASES = ("load", "forward", "backward", "optimizer", "prefill", "decode")


class Allocation(NamedTuple):
    """One storage from birth to death. ``size``: bytes; ``born``/``died``: positions on the event axis
    (``died`` is the profile's ``length`` if it was still alive at the end)."""

    size: int
    kind: str
    place: str  # "device" | "host"
    module: str
    op: str
    phase: str
    born: int
    died: int


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of the event axis. ``peak_bytes``, ``end_bytes``: allocated on the device."""

    name: str
    start: int
    stop: int
    peak_bytes: int
    end_bytes: int
    seconds: float = 0.0


class PeakAt(msgspec.Struct, frozen=True, kw_only=True):
    phase: str
    module: str
    op: str


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Memory over one warm step.

    Attributes:
        origin: ``"predicted"``, ``"measured"`` or ``"read"``.
        peak_bytes: allocated on the device at the peak (sum of the sizes asked for, as the allocator rounds).
        reserved_bytes: held by the allocator at its peak.
        process_bytes: what the driver (GPU) or the kernel's anonymous counter (CPU) shows: reserved + context.
        host_peak_bytes: allocated on the host beside a device; 0 on the CPU itself.
        step_seconds: one optimizer step, all micro-batches.
        assumptions: message keys of what had to be assumed (data-dependent shapes, an unknown kernel).
    """

    origin: str
    allocations: tuple[Allocation, ...]
    length: int
    phases: tuple[Phase, ...]
    peak_bytes: int
    peak_index: int
    peak_at: PeakAt
    reserved_bytes: int
    process_bytes: int
    host_peak_bytes: int = 0
    step_seconds: float = 0.0
    uncertainty_peak: float = 0.03
    uncertainty_seconds: float = 0.25
    assumptions: tuple[str, ...] = ()

    def alive_at(self, index: int, place: str = "device") -> Iterator[Allocation]:
        return (a for a in self.allocations if a.place == place and a.born <= index < a.died)

    def breakdown(self, index: int | None = None) -> dict[str, int]:
        """Bytes by kind at an event (default: the peak); adds up to ``peak_bytes`` there."""
        sums = dict.fromkeys(KINDS, 0)
        for a in self.alive_at(self.peak_index if index is None else index):
            sums[a.kind] += a.size
        return sums

    def by_module(self, index: int | None = None, depth: int = 4) -> dict[str, dict[str, int]]:
        """Bytes by module path (cut after ``depth`` parts) and kind at an event, the largest first."""
        sums: dict[str, dict[str, int]] = {}
        for a in self.alive_at(self.peak_index if index is None else index):
            path = ".".join(a.module.split(".")[:depth])
            row = sums.setdefault(path, {})
            row[a.kind] = row.get(a.kind, 0) + a.size
        return dict(sorted(sums.items(), key=lambda item: -sum(item[1].values())))

    def curves(self, points: int = 400) -> tuple[list[int], dict[str, list[int]]]:
        """The timeline: event indices and, by kind, bytes on the device. Each point is the instant of the
        largest total within its stretch of events, so the peak is never lost between points."""
        changes: dict[int, dict[str, int]] = {}
        for a in self.allocations:
            if a.place != "device":
                continue
            born = changes.setdefault(a.born, {})
            born[a.kind] = born.get(a.kind, 0) + a.size
            if a.died < self.length:
                died = changes.setdefault(a.died, {})
                died[a.kind] = died.get(a.kind, 0) - a.size
        stretch = max(1, self.length // points)
        axis: list[int] = []
        series: dict[str, list[int]] = {k: [] for k in KINDS}
        level = dict.fromkeys(KINDS, 0)
        best: tuple[int, int, dict[str, int]] | None = None
        bucket = -1
        for index in sorted(changes):
            if index // stretch != bucket:
                if best is not None:
                    axis.append(best[1])
                    for k in KINDS:
                        series[k].append(best[2][k])
                bucket, best = index // stretch, None
            for kind, size in changes[index].items():
                level[kind] += size
            total = sum(level.values())
            if best is None or total > best[0]:
                best = (total, index, dict(level))
        if best is not None:
            axis.append(best[1])
            for k in KINDS:
                series[k].append(best[2][k])
        return axis, series

    def to_json(self, budget_bytes: int) -> dict[str, Any]:
        """The estimate's JSON object (see the contract), judged against a budget for the whole process."""
        phases: dict[str, dict[str, Any]] = {}
        for p in self.phases:
            seen = phases.setdefault(
                p.name, {"name": p.name, "peak_bytes": 0, "end_bytes": 0, "seconds": 0.0}
            )
            seen["peak_bytes"] = max(seen["peak_bytes"], p.peak_bytes)
            seen["end_bytes"] = p.end_bytes
            seen["seconds"] += p.seconds
        return {
            "schema": 1,
            "fits": self.process_bytes <= budget_bytes,
            "budget_bytes": budget_bytes,
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "process_bytes": self.process_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "breakdown": self.breakdown(),
            "peak_at": msgspec.to_builtins(self.peak_at),
            "phases": list(phases.values()),
            "step_seconds": self.step_seconds,
            "uncertainty": {"peak": self.uncertainty_peak, "seconds": self.uncertainty_seconds},
            "assumptions": list(self.assumptions),
            "origin": self.origin,
        }
