"""Which repeated blocks need not all be recorded: finding runs of equal blocks and shortening the model to them."""

from __future__ import annotations

from typing import Any

import torch

from memfit.simulate.trace import KEPT, Run

LONGEST_PERIOD = 8


def signature(module: torch.nn.Module, index: int) -> tuple[Any, ...]:
    """What makes two blocks equal: classes, shapes, dtypes, what trains, and scalar settings. A setting that is the
    block's own index counts as equal."""
    rows: list[Any] = []
    for name, part in module.named_modules():
        scalars = tuple(
            (k, "index" if v is not True and v is not False and v == index and isinstance(v, int) else v)
            for k, v in sorted(part.__dict__.items())
            if (v is None or isinstance(v, bool | int | float | str)) and not k.startswith("_")
        )
        tensors = tuple(
            (k, tuple(t.shape), t.dtype, t.requires_grad)
            for store in (part._parameters, part._buffers)
            for k, t in store.items()
            if t is not None
        )
        rows.append((name, type(part), scalars, tensors))
    return tuple(rows)


def find_runs(marks: list[Any]) -> list[tuple[int, int, int]]:
    """(start, period, units) of the stretches worth shortening, left to right; the shortest period wins."""
    runs: list[tuple[int, int, int]] = []
    at = 0
    while at < len(marks):
        best: tuple[int, int] | None = None
        for period in range(1, LONGEST_PERIOD + 1):
            units = 1
            while marks[at + units * period : at + (units + 1) * period] == marks[at : at + period]:
                units += 1
            if units > KEPT and (best is None or units * period > best[0] * best[1] + period):
                best = (period, units)
        if best is None:
            at += 1
        else:
            runs.append((at, best[0], best[1]))
            at += best[0] * best[1]
    return runs


def shorten(model: torch.nn.Module) -> list[Run]:
    """Removes repeated blocks beyond ``KEPT`` from every list of modules, outermost lists first. Returns the runs
    in the order in which the recorded trace must be expanded: innermost first, left to right within a list."""
    by_depth: dict[int, list[Run]] = {}
    depth = 0
    while True:
        lists = _lists(model)
        if not any(path.count(".") >= depth for path, _ in lists):
            break
        for path, container in lists:
            if path.count(".") == depth:
                by_depth.setdefault(depth, []).extend(_shorten_list(path, container))
        depth += 1
    return [run for level in sorted(by_depth, reverse=True) for run in by_depth[level]]


def _lists(model: torch.nn.Module) -> list[tuple[str, Any]]:
    kinds = (torch.nn.ModuleList, torch.nn.Sequential)
    return [(path, m) for path, m in model.named_modules() if isinstance(m, kinds) and len(m) > KEPT]


def _shorten_list(path: str, container: Any) -> list[Run]:
    runs: list[Run] = []
    marks = [hash(signature(block, index)) for index, block in enumerate(container)]
    removed = 0
    for start, period, units in find_runs(marks):
        runs.append(Run(path, start, period, KEPT, units))
        first = start - removed + period * KEPT
        for _ in range(period * (units - KEPT)):
            del container[first]
            removed += 1
    return runs


def block_paths(model: torch.nn.Module) -> tuple[str, ...]:
    """Paths of the children of every list of modules: what a recorder calls blocks."""
    return tuple(
        f"{path}.{index}" if path else str(index)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
        for index in range(len(module))
    )
