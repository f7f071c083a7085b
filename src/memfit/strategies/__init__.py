"""The shelf: one file each. A new file is known to the estimator, planner, runner and tests at once."""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from memfit.core.errors import BadInput
from memfit.core.step import Step, World
from memfit.core.strategy import STAGES, Strategy


@functools.cache
def shelf() -> Mapping[str, type[Strategy]]:
    """All strategies by name."""
    found: dict[str, type[Strategy]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for item in vars(module).values():
            if isinstance(item, type) and issubclass(item, Strategy) and item.__module__ == module.__name__:
                found[item.name] = item
    return dict(sorted(found.items(), key=lambda pair: (STAGES.index(pair[1].stage), pair[0])))


def read_strategy(entry: Mapping[str, Any], file: str | None = None) -> Strategy:
    """A strategy from a ``[[strategy]]`` table. Raises :class:`BadInput` naming the valid choices."""
    name = entry["name"]
    if name not in shelf():
        near = difflib.get_close_matches(name, shelf(), n=1)
        raise BadInput("input.unknown_name_near" if near else "input.unknown_name", file=file,
                       setting="strategy.name", value=name, near=near[0] if near else "",
                       choices=", ".join(shelf()))  # fmt: skip
    kind = shelf()[name]
    options = {k: v for k, v in entry.items() if k != "name"}
    for key in options:
        if key not in kind.__struct_fields__:
            raise BadInput("input.unknown_key", file=file, setting=f"strategy.{name}.{key}", value=key,
                           choices=", ".join(kind.__struct_fields__) or "-")  # fmt: skip
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        raise BadInput("input.wrong_type", file=file, setting=f"strategy.{name}", value=options,
                       reason=str(error), choices=", ".join(kind.__struct_fields__)) from None  # fmt: skip


def in_order(strategies: Iterable[Strategy]) -> tuple[Strategy, ...]:
    """By stage, each stage in the order given."""
    return tuple(sorted(strategies, key=lambda s: STAGES.index(s.stage)))


def apply_all(strategies: Iterable[Strategy], step: Step, world: World) -> Step:
    """Applies a combination. Raises :class:`BadInput` where a need is missing or two exclude each other."""
    for strategy in in_order(strategies):
        missing = strategy.needs - step.capabilities
        if missing:
            raise BadInput(
                "strategy.needs", setting=f"strategy.{strategy.name}", missing=", ".join(sorted(missing))
            )
        clash = strategy.excludes & step.capabilities
        if clash:
            raise BadInput(
                "strategy.excludes", setting=f"strategy.{strategy.name}", clash=", ".join(sorted(clash))
            )
        step = strategy.apply(step, world)
        step = replace(step, capabilities=step.capabilities | strategy.gives,
                       applied=(*step.applied, strategy.entry()))  # fmt: skip
    return step
