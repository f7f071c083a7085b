"""The structure rules of the code, checked by reading it (nothing is imported).

Rooms import one way: cli -> memfit's own __init__ -> api -> {report, watch, doctor, export, run, plan} ->
simulate -> {strategies, engines, data, models, devices} -> core. A room may import itself and lower levels.

- rooms of one level do not import each other;
- a strategy's file imports no other strategy's file;
- core imports no other room and no heavy package;
- ``import memfit``, core, cli and report load no heavy package, neither themselves nor through their imports;
- nothing outside strategies/ names a strategy (exempt a line with ``# names a strategy: WHY``, or, where the
  same word means something else, ``# not a strategy: WHY``);
- no file has more than 400 lines.

    python tools/check_imports.py [SRC]        exit status 1 and one line per violation, or 0
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "memfit"
FACE = "memfit"  # the package's own __init__: what `import memfit` offers
LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"cli", "__main__"}),
    frozenset({FACE}),
    frozenset({"api"}),
    frozenset({"report", "watch", "doctor", "export", "run", "plan"}),
    frozenset({"simulate"}),
    frozenset({"strategies", "engines", "data", "models", "devices"}),
    frozenset({"core"}),
)
LEVEL_OF = {room: number for number, level in enumerate(LEVELS) for room in level}
ORDER = " -> ".join(", ".join(sorted(level)) for level in LEVELS)
HEAVY = frozenset(
    {"torch", "transformers", "numpy", "pyarrow", "scipy", "sklearn", "tokenizers", "safetensors"}
)
LIGHT_ROOMS = frozenset({FACE, "core", "cli", "report", "__main__"})
MAX_LINES = 400
EXEMPTIONS = ("# names a strategy:", "# not a strategy:")


@dataclass(frozen=True)
class Import:
    """One imported module. ``at_load``: when the file is imported; ``for_types``: under TYPE_CHECKING."""

    target: str
    line: int
    at_load: bool
    for_types: bool


@dataclass(frozen=True)
class Source:
    """One file of the package. ``module``: its dotted name, ``memfit`` for the package's own ``__init__``."""

    path: Path
    module: str
    text: str
    tree: ast.Module
    imports: list[Import] = field(default_factory=list)

    @property
    def room(self) -> str:
        return room_of(self.module)


def room_of(module: str) -> str:
    """``memfit.plan.search`` -> ``plan``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FACE


def read_tree(src: Path) -> dict[str, Source]:
    """Every Python file under ``src/memfit`` by module name."""
    sources: dict[str, Source] = {}
    for path in sorted((src / PACKAGE).rglob("*.py")):
        parts = list(path.relative_to(src).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        text = path.read_text(encoding="utf-8")
        module = ".".join(parts)
        sources[module] = Source(path, module, text, ast.parse(text, filename=str(path)))
    for source in sources.values():
        source.imports.extend(find_imports(source, sources))
    return sources


def find_imports(source: Source, sources: dict[str, Source]) -> Iterator[Import]:
    """All imports of a file, wherever they stand. The target of ``from memfit.x import y`` is the module
    ``memfit.x.y`` where there is one, else ``memfit.x``."""
    package = source.module if source.path.name == "__init__.py" else source.module.rpartition(".")[0]

    def visit(node: ast.AST, at_load: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(name.name, node.lineno, at_load, for_types)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            for name in node.names:
                full = f"{base}.{name.name}"
                yield Import(full if full in sources else base, node.lineno, at_load, for_types)
        elif isinstance(node, ast.If) and _is_type_checking(node.test):
            for statement in node.body:
                yield from visit(statement, at_load, True)
            for statement in node.orelse:
                yield from visit(statement, at_load, for_types)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_load and not inside, for_types)

    yield from visit(source.tree, True, False)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def is_heavy(target: str) -> bool:
    return target.partition(".")[0] in HEAVY


def check_direction(sources: dict[str, Source]) -> Iterator[str]:
    for source in sources.values():
        if source.room not in LEVEL_OF:
            yield f"{source.path}:1: room {source.room!r} has no place in the order {ORDER}"
            continue
        level = LEVEL_OF[source.room]
        for found in source.imports:
            if found.target.partition(".")[0] != PACKAGE:
                continue
            other = room_of(found.target)
            where = f"{source.path}:{found.line}: {source.room} imports {found.target}"
            if other == source.room:
                continue
            beside = ", ".join(sorted(LEVELS[level]))
            if other not in LEVEL_OF:
                yield f"{where}, which does not exist"
            elif source.room == "core":
                yield f"{where}; core imports no other room"
            elif LEVEL_OF[other] == level:
                yield f"{where}; rooms of one level do not import each other ({beside})"
            elif LEVEL_OF[other] < level:
                yield f"{where}, against the order {ORDER}"


def check_strategies_apart(sources: dict[str, Source]) -> Iterator[str]:
    for source in sources.values():
        if source.room != "strategies":
            continue
        for found in source.imports:
            if room_of(found.target) != "strategies" or found.target == source.module:
                continue
            where = f"{source.path}:{found.line}"
            if source.module == f"{PACKAGE}.strategies":
                yield f"{where}: the shelf finds strategies by pkgutil, it names none ({found.target})"
            else:
                yield (
                    f"{where}: a strategy imports {found.target}; strategies never import each other "
                    "(ask for a capability instead)"
                )


def check_heavy(sources: dict[str, Source]) -> Iterator[str]:
    for source in sources.values():
        for found in source.imports:
            if not is_heavy(found.target) or found.for_types:
                continue
            if source.room == "core":
                yield f"{source.path}:{found.line}: core imports {found.target}; core needs no heavy package"
            elif source.room in LIGHT_ROOMS and found.at_load:
                yield (
                    f"{source.path}:{found.line}: {found.target} is loaded when {source.module} is imported; "
                    "import it in the function that needs it"
                )
    yield from check_heavy_through(sources)


def check_heavy_through(sources: dict[str, Source]) -> Iterator[str]:
    """Light files that load a heavy package through other files, each with the shortest chain."""
    for start in sources.values():
        if start.room not in LIGHT_ROOMS:
            continue
        reported: set[str] = set()
        for chain, found in heavy_chains(start, sources):
            if chain[1] in reported:
                continue
            reported.add(chain[1])
            line = next(i.line for i in start.imports if chain[1] in loaded_by(i.target, sources))
            yield (
                f"{start.path}:{line}: {found.target} is loaded when {start.module} is imported, through "
                f"{' -> '.join(chain[1:])} (line {found.line})"
            )


def heavy_chains(start: Source, sources: dict[str, Source]) -> Iterator[tuple[list[str], Import]]:
    """Breadth first over what importing ``start`` runs: (modules from start on, the last one's import)."""
    chains = {start.module: [start.module]}
    queue = [start.module]
    for module in queue:  # grows while it is walked
        for found in sources[module].imports:
            if not found.at_load or found.for_types:
                continue
            if is_heavy(found.target) and sources[module].room not in LIGHT_ROOMS:
                yield chains[module], found
            for loaded in loaded_by(found.target, sources):
                if loaded not in chains:
                    chains[loaded] = [*chains[module], loaded]
                    queue.append(loaded)


def loaded_by(target: str, sources: dict[str, Source]) -> list[str]:
    """The package's modules that importing ``target`` runs: itself and the ``__init__`` files above it."""
    parts = target.split(".")
    names = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    return [name for name in names if name in sources]


def strategy_names(sources: dict[str, Source]) -> frozenset[str]:
    """What ``name = "…"`` and ``name: ClassVar[str] = "…"`` in the classes of ``strategies/`` say."""
    names: set[str] = set()
    for source in sources.values():
        if source.room != "strategies":
            continue
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for item in node.body:
                if not isinstance(item, ast.AnnAssign | ast.Assign):
                    continue
                target = item.target if isinstance(item, ast.AnnAssign) else item.targets[0]
                if (
                    isinstance(target, ast.Name)
                    and target.id == "name"
                    and isinstance(item.value, ast.Constant)
                ):
                    names.add(str(item.value.value))
    return frozenset(names)


def check_names(sources: dict[str, Source]) -> Iterator[str]:
    names = strategy_names(sources)
    for source in sources.values():
        if source.room == "strategies":
            continue
        lines = source.text.splitlines()
        in_fstrings = {id(p) for n in ast.walk(source.tree) if isinstance(n, ast.JoinedStr) for p in n.values}
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Constant) or node.value not in names or id(node) in in_fstrings:
                continue
            if not any(mark in lines[node.lineno - 1] for mark in EXEMPTIONS):
                yield (
                    f"{source.path}:{node.lineno}: names the strategy {node.value!r}; only strategies/ does. "
                    "Ask for a capability, or say why on that line: `# names a strategy: WHY` "
                    "(`# not a strategy: WHY` where the same word means something else)"
                )


def check_length(sources: dict[str, Source]) -> Iterator[str]:
    for source in sources.values():
        count = len(source.text.splitlines())
        if count > MAX_LINES:
            yield f"{source.path}:{count}: {count} lines; split it (at most {MAX_LINES})"


def violations(src: Path) -> list[str]:
    """Every breach of a rule under ``src``, one line of text each."""
    sources = read_tree(src)
    if not sources:
        raise SystemExit(f"{src / PACKAGE} holds no Python files")
    checks = (check_direction, check_strategies_apart, check_heavy, check_names, check_length)
    return [text for check in checks for text in check(sources)]


def main(arguments: list[str]) -> int:
    src = Path(arguments[0]) if arguments else Path(__file__).parent.parent / "src"
    found = violations(src)
    for text in found:
        print(text)
    print(f"import rules: {len(found)} broken" if found else "import rules: held")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
