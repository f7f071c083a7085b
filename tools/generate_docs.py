"""Fills the generated parts of the docs, so that they cannot drift from the code and the benches.

A generated part stands between ``<!-- generated: NAME ARGUMENT… -->`` and ``<!-- end generated -->`` in
README*.md or docs/**/*.md. NAME is a function registered here.

    python tools/generate_docs.py            rewrites what is stale
    python tools/generate_docs.py --check    lists what is stale; exit status 1 if anything is
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from memfit.core import job
from memfit.core.profile import KINDS
from memfit.core.strategy import Strategy
from memfit.core.units import show_bytes, show_seconds
from memfit.strategies import shelf

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- generated: ([^\n]*?) -->\n)(.*?)(<!-- end generated -->)", re.DOTALL)
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": job.Model,
    "task": job.Task,
    "data": job.Data,
    "budget": job.Budget,
    "run": job.Run,
}
Block = Callable[..., str]
BLOCKS: dict[str, Block] = {}


def block(name: str) -> Callable[[Block], Block]:
    """Registers what fills ``<!-- generated: NAME -->``."""

    def register(function: Block) -> Block:
        BLOCKS[name] = function
        return function

    return register


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


@block("job-keys")
def job_keys() -> str:
    """One table per section of the job file: key, type, default, meaning."""
    meanings = tomllib.loads((ROOT / "tools/job_keys.toml").read_text(encoding="utf-8"))
    if set(meanings) != set(SECTIONS) or set(SECTIONS) | {"strategy"} != set(job.Job.__struct_fields__):
        raise SystemExit(
            f"tools/job_keys.toml describes {sorted(meanings)}, job files have {sorted(SECTIONS)}"
        )
    return "\n".join(_section(name, struct, meanings[name]) for name, struct in SECTIONS.items())


def _section(name: str, struct: type[msgspec.Struct], meanings: dict[str, str]) -> str:
    fields = msgspec.structs.fields(struct)
    keys = {f.name for f in fields}
    if keys != set(meanings):
        raise SystemExit(
            f"tools/job_keys.toml, [{name}]: missing or not in job.py: {sorted(keys ^ set(meanings))}"
        )
    hints = get_type_hints(struct)
    rows = [[f"`{f.name}`", show_type(hints[f.name]), _default(f), meanings[f.name]] for f in fields]
    return f"### `[{name}]`\n\n" + table(["key", "type", "default", "meaning"], rows)


def show_type(hint: Any) -> str:
    """A type in a reader's words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(show_type(a) for a in arguments if a is not type(None))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {show_type(arguments[0])}"
        return f"list of {len(arguments)}: {show_type(arguments[0])}"
    words = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`", dict: "table"}
    return words[origin or hint]


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if value is None:
        return "left out"
    if isinstance(value, dict):
        return "`{}`"
    return f"`{json.dumps(value)}`"


@block("strategies")
def strategies() -> str:
    """One row per strategy on the shelf."""
    rows = []
    for name, kind in shelf().items():
        page = ROOT / f"docs/strategies/{name}.md"
        title = f"[`{name}`](strategies/{name}.md)" if page.exists() else f"`{name}`"
        about = (sys.modules[kind.__module__].__doc__ or "").strip().split("\n\n")[0]
        text = " ".join(about.removeprefix(f"{name}:").split())
        lowers = ", ".join(k for k in KINDS if k in kind.targets)
        rows.append([title, kind.stage, lowers, _fidelity(kind), text[:1].upper() + text[1:]])
    return table(["name", "stage", "lowers", "fidelity", "what it does"], rows)


@block("strategy-options")
def strategy_options() -> str:
    """Each strategy's options, with what they mean and what the strategy asks of a job."""
    return "\n".join(_options(name, kind) for name, kind in shelf().items())


def _options(name: str, kind: type[Strategy]) -> str:
    hints = get_type_hints(kind)
    fields = msgspec.structs.fields(kind)
    parts = [f"### `{name}`\n", " ".join((kind.__doc__ or "").split()).replace("``", "`") + "\n"]
    if fields:
        rows = [[f"`{f.name}`", show_type(hints[f.name]), _default(f)] for f in fields]
        parts.append(table(["option", "type", "default"], rows))
    for label, capabilities in (("Needs", kind.needs), ("Excludes", kind.excludes), ("Gives", kind.gives)):
        if capabilities:
            parts.append(f"{label}: " + ", ".join(f"`{c}`" for c in sorted(capabilities)) + ".\n")
    return "\n".join(parts)


def _fidelity(kind: type[Strategy]) -> str:
    if kind.bound == 0.0:
        return "exact"
    with_defaults = kind().fidelity
    bound = f"a step's loss within {100 * kind.bound:g} %"
    return (
        f"lossy ({bound})" if with_defaults == "lossy" else f"exact by default; lossy ({bound}) with consent"
    )


@block("results")
def results(name: str, *columns: str) -> str:
    """A table of ``bench/results/NAME.json``: a list of flat objects, or an object with it as ``rows``.

    ``columns``: which keys to show, in order (all, if none is given). A key's unit decides how it is shown.
    """
    path = ROOT / f"bench/results/{name}.json"
    if not path.exists():
        return f"No results yet: `make bench` writes `bench/results/{name}.json`.\n"
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = content["rows"] if isinstance(content, dict) else content
    keys = list(columns) or list(dict.fromkeys(k for row in rows for k in row))
    return table([_title(k) for k in keys], [[show_value(k, row.get(k)) for k in keys] for row in rows])


def _title(key: str) -> str:
    return re.sub(r"_(bytes|seconds)$", "", key).replace("_", " ")


def show_value(key: str, value: Any) -> str:
    """A figure as its key's unit asks: ``…_bytes``, ``…_seconds``, ``…_error`` (a share)."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if key.endswith("_bytes"):
            return show_bytes(value)
        if key.endswith("_seconds"):
            return show_seconds(value)
        if key.endswith("_error"):
            return f"{100 * value:+.2f} %"
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    return str(value) if not isinstance(value, list) else ", ".join(map(str, value))


def documents() -> Iterator[Path]:
    yield from sorted(ROOT.glob("README*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def fill(text: str, place: str) -> str:
    """The text with every generated part made anew."""

    def one(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        if name not in BLOCKS:
            raise SystemExit(f"{place}: no generated part is called {name!r}; there are: {', '.join(BLOCKS)}")
        return f"{match[1]}{BLOCKS[name](*arguments)}{match[4]}"

    if text.count("<!-- generated: ") != len(BLOCK.findall(text)):
        raise SystemExit(f"{place}: a generated part is not closed by <!-- end generated -->")
    return BLOCK.sub(one, text)


def main(arguments: list[str]) -> int:
    stale = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        new = fill(text, str(path))
        if new != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in arguments:
                path.write_text(new, encoding="utf-8")
    if "--check" not in arguments:
        print(f"generated docs: rewrote {', '.join(stale)}" if stale else "generated docs: nothing to do")
        return 0
    print(
        f"generated docs: stale, run `make docs`: {', '.join(stale)}"
        if stale
        else "generated docs: up to date"
    )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
