"""Simulated combinations, each once: the search asks, the simulator judges."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from memfit.core.device import Device
from memfit.core.errors import BadInput, CannotSimulate
from memfit.core.profile import Profile
from memfit.core.strategy import Strategy
from memfit.strategies import in_order

Entries = tuple[Strategy, ...]


class Simulations:
    """Profiles by combination, and what each cost to find.

    Args:
        build: makes the job's step in a world.
        device: the target.
        limit_bytes: what a process may hold (the budget less its margin).
        on_simulated: called with the number of simulations after each.
    """

    def __init__(
        self, build: Any, device: Device, limit_bytes: int, on_simulated: Callable[[int], None] | None = None
    ) -> None:
        self.build, self.device, self.limit_bytes, self.on_simulated = (
            build,
            device,
            limit_bytes,
            on_simulated,
        )
        self.profiles: dict[str, tuple[Entries, Profile | None]] = {}
        self.started = time.perf_counter()

    @property
    def count(self) -> int:
        return len(self.profiles)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def profile(self, strategies: Iterable[Strategy]) -> Profile | None:
        """The profile of a combination; None where its strategies cannot work together on this step."""
        entries = in_order(strategies)
        key = _key(entries)
        if key not in self.profiles:
            self._keep(key, entries, self._simulate(entries))
        return self.profiles[key][1]

    def prefetch(self, combinations: Iterable[Iterable[Strategy]]) -> None:
        """Simulates several combinations side by side, one process per core."""
        wanted: dict[str, Entries] = {}
        for strategies in combinations:
            entries = in_order(strategies)
            key = _key(entries)
            if key not in self.profiles:
                wanted[key] = entries
        workers = min(len(wanted), os.cpu_count() or 1)
        if workers < 2 or multiprocessing.current_process().daemon:
            return
        global _forked
        _forked = self
        # Fork: a worker inherits the imported libraries and the user's factory; it computes nothing real.
        with multiprocessing.get_context("fork").Pool(workers, initializer=_alone) as pool:
            for key, profile in pool.imap_unordered(_in_worker, wanted.items()):
                self._keep(key, wanted[key], profile)
        _forked = None

    def _simulate(self, entries: Entries) -> Profile | None:
        from memfit.simulate.simulator import simulate

        try:
            return simulate(self.build, entries, self.device)
        except (BadInput, CannotSimulate):
            if not entries:
                raise  # the job itself is at fault, not a combination
            return None

    def _keep(self, key: str, entries: Entries, profile: Profile | None) -> None:
        self.profiles[key] = (entries, profile)
        if self.on_simulated is not None:
            self.on_simulated(self.count)

    def fits(self, profile: Profile | None) -> bool:
        return profile is not None and profile.process_bytes <= self.limit_bytes

    def known(self) -> list[tuple[Entries, Profile]]:
        return [(entries, profile) for entries, profile in self.profiles.values() if profile is not None]


_forked: Simulations | None = None


def _key(entries: Entries) -> str:
    return json.dumps([s.entry() for s in entries], sort_keys=True)


def _alone() -> None:
    import torch

    torch.set_num_threads(1)  # the parent's thread pool did not come along


def _in_worker(item: tuple[str, Entries]) -> tuple[str, Profile | None]:
    assert _forked is not None
    return item[0], _forked._simulate(item[1])
