"""The search: fastest combination whose process peak fits.

An axis is a strategy, its choices are the settings that it finds worth trying, the cheapest in time first. What
costs no time is taken first. What is left is searched axis by axis: on the last axis the first setting that fits is
found by bisection (stronger settings need less memory and more time), on the others every setting is tried whose
own time leaves room for improvement. Every answer is a simulation of the whole combination.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.core.profile import Profile
from memfit.core.strategy import Situation, Strategy
from memfit.plan.simulations import Entries, Simulations

FREE = 1.002  # slower by less than this counts as no cost


@dataclass(frozen=True)
class Axis:
    """One strategy's settings, cheapest in time first."""

    name: str
    choices: tuple[Strategy, ...]


@dataclass
class Best:
    entries: Entries
    profile: Profile


def axes_for(
    situation: Situation, kinds: Sequence[type[Strategy]], fixed: Entries, lossy: bool, allow: Sequence[str]
) -> list[Axis]:
    """The axes open to a job: what it fixed itself is closed, lossy ones need permission (and ``lossy``)."""
    taken = {s.name for s in fixed}
    axes: list[Axis] = []
    for kind in kinds:
        if kind.name in taken:
            continue
        choices = tuple(c for c in kind.worth_trying(situation)
                        if c.fidelity == "exact" or (lossy and kind.name in allow))  # fmt: skip
        if choices:
            axes.append(Axis(kind.name, choices))
    return axes


class Search:
    """One search over a list of axes.

    Args:
        deadline_seconds: when the search stops improving what it has; it always ends with a simulated plan.
    """

    def __init__(
        self, simulations: Simulations, axes: list[Axis], fixed: Entries, deadline_seconds: float
    ) -> None:
        self.simulations, self.axes, self.fixed, self.deadline = simulations, axes, fixed, deadline_seconds
        self.best: Best | None = None
        self.smallest: Best | None = None

    def run(self) -> Best:
        """The fastest fitting combination, or the one of least process peak where none fits."""
        base, rest = self._free(self.fixed)
        self._ladder(base, self._ordered(rest, base))
        if self.best is not None:
            self._lighten()
        answer = self.best or self.smallest
        assert answer is not None
        return answer

    def _see(self, entries: Entries) -> Profile | None:
        profile = self.simulations.profile(entries)
        if profile is None:
            return None
        if self.smallest is None or profile.process_bytes < self.smallest.profile.process_bytes:
            self.smallest = Best(entries, profile)
        if self.simulations.fits(profile) and (
            self.best is None or profile.step_seconds < self.best.profile.step_seconds
        ):
            self.best = Best(entries, profile)
        return profile

    @property
    def _late(self) -> bool:
        return self.simulations.seconds > self.deadline

    def _free(self, base: Entries) -> tuple[Entries, list[Axis]]:
        """Takes the best setting of each short axis that needs no time (or less), all of them together."""
        rest = [axis for axis in self.axes if len(axis.choices) > 2]
        short = [axis for axis in self.axes if len(axis.choices) <= 2]
        self.simulations.prefetch((*base, choice) for axis in short for choice in axis.choices)
        now = self._see(base)
        assert now is not None
        taken = base
        for axis in short:
            free: list[tuple[int, float, Strategy]] = []
            for choice in axis.choices:
                profile = self._see((*base, choice))
                if (
                    profile is not None
                    and profile.peak_bytes <= now.peak_bytes
                    and (profile.step_seconds <= now.step_seconds * FREE)
                ):
                    free.append((profile.peak_bytes, profile.step_seconds, choice))
            if free:
                taken = (*taken, min(free, key=lambda found: found[:2])[2])
            else:
                rest.append(axis)
        self._see(taken)
        return taken, rest

    def _ordered(self, axes: list[Axis], base: Entries) -> list[Axis]:
        """Few settings outside, the longest ladder inside, where bisection needs the fewest questions."""
        return sorted(axes, key=lambda axis: len(axis.choices))

    def _ladder(self, base: Entries, axes: list[Axis]) -> None:
        if self.simulations.fits(self.simulations.profile(base)) or not axes:
            self._see(base)
            return
        if len(axes) == 1:
            self._bisect(base, axes[0])
            return
        self._bisect(base, axes[-1])  # without the outer axis
        for choice in axes[0].choices:
            if self._late and (self.best is not None or self.smallest is not None):
                strongest = axes[0].choices[-1]
                if self.best is None and choice is not strongest:
                    continue
                if self.best is not None:
                    return
            profile = self._see((*base, choice))
            if profile is None or (
                self.best is not None and profile.step_seconds >= self.best.profile.step_seconds
            ):
                continue  # what comes on top costs more
            self._ladder((*base, choice), axes[1:])

    def _bisect(self, base: Entries, axis: Axis) -> None:
        low, high = 0, len(axis.choices) - 1
        self.simulations.prefetch([(*base, axis.choices[high]), (*base, axis.choices[high // 2])])
        if not self.simulations.fits(self._see((*base, axis.choices[high]))):
            high -= 1  # the last setting is not always the strongest
            if high < 0 or not self.simulations.fits(self._see((*base, axis.choices[high]))):
                return
        while low < high:
            middle = (low + high) // 2
            if self.simulations.fits(self._see((*base, axis.choices[middle]))):
                high = middle
            else:
                low = middle + 1
        self._see((*base, axis.choices[high]))

    def _lighten(self) -> None:
        """Drops what the best plan does not need."""
        assert self.best is not None
        for strategy in self.best.entries:
            if strategy in self.fixed or self._late:
                continue
            without = tuple(s for s in self.best.entries if s is not strategy)
            profile = self.simulations.profile(without)
            if self.simulations.fits(profile) and profile is not None and (
                profile.step_seconds <= self.best.profile.step_seconds * FREE
            ):  # fmt: skip
                self.best = Best(without, profile)
