"""Checks on the docs that a reader would trip over. Exit status 1 and one line per fault, or 0.

- relative links in *.md and docs/**/*.md lead to files (and, with #, to headings) that exist;
- each strategy has a row in docs/strategies.md or a page docs/strategies/NAME.md;
- README.md and README.zh.md have the same number of headings and the same command blocks;
- every ``memfit COMMAND`` in a README's code block is a command (a file of src/memfit/cli).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from check_imports import read_tree, strategy_names

LINK = re.compile(r"!?\[[^\]\n]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```\s*$", re.DOTALL | re.MULTILINE)
SHELL = ("", "sh", "bash", "shell", "console")
NOT_COMMANDS = ("main", "options")  # files of cli/ without a command, as in cli/main.py


def without_code(text: str) -> str:
    """The text without fenced code, where ``#`` is a comment and brackets are no links."""
    return FENCE.sub("", text)


def headings(text: str) -> list[str]:
    return re.findall(r"^#{1,6} +(.+?) *$", without_code(text), re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Heading anchors as GitHub makes them."""
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings(text)}


def documents(root: Path) -> Iterator[Path]:
    yield from sorted(root.glob("*.md"))
    yield from sorted((root / "docs").rglob("*.md"))


def check_links(root: Path) -> Iterator[str]:
    for path in documents(root):
        for target in LINK.findall(without_code(path.read_text(encoding="utf-8"))):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            there = (path.parent / name).resolve() if name else path
            if not there.exists():
                yield f"{path.relative_to(root)}: link to {target}, which does not exist"
            elif (
                anchor and there.suffix == ".md" and anchor not in anchors(there.read_text(encoding="utf-8"))
            ):
                yield f"{path.relative_to(root)}: link to {target}, but {there.name} has no such heading"


def check_strategies(root: Path) -> Iterator[str]:
    overview = root / "docs/strategies.md"
    text = overview.read_text(encoding="utf-8") if overview.exists() else ""
    for name in sorted(strategy_names(read_tree(root / "src"))):
        if f"| `{name}`" not in text and not (root / f"docs/strategies/{name}.md").exists():
            yield f"docs/strategies.md: no row for {name} (run `make docs`) and no page strategies/{name}.md"


def command_blocks(text: str) -> list[str]:
    """Shell blocks without comments: a translation may translate those."""
    blocks = [body for language, body in FENCE.findall(text) if language.strip() in SHELL]
    return [re.sub(r"[ \t]*(^|\s)#.*$", "", b, flags=re.MULTILINE).strip() for b in blocks]


def check_readmes(root: Path) -> Iterator[str]:
    texts = {}
    for name in ("README.md", "README.zh.md"):
        if not (root / name).exists():
            yield f"{name}: missing"
            return
        texts[name] = (root / name).read_text(encoding="utf-8")
    english, chinese = texts.values()
    counts = len(headings(english)), len(headings(chinese))
    if counts[0] != counts[1]:
        yield f"README.zh.md: {counts[1]} headings, README.md has {counts[0]}"
    for number, (a, b) in enumerate(zip_longest(command_blocks(english), command_blocks(chinese)), 1):
        if a != b:
            yield f"README.zh.md: command block {number} differs from README.md: {b!r} instead of {a!r}"


def commands(root: Path) -> set[str]:
    files = (root / "src/memfit/cli").glob("*.py")
    names = {f.stem.replace("_", "-") for f in files if not f.stem.startswith("_")}
    return names - set(NOT_COMMANDS)


def check_commands(root: Path) -> Iterator[str]:
    known = commands(root)
    for path in sorted(root.glob("README*.md")):
        for _, body in FENCE.findall(path.read_text(encoding="utf-8")):
            for command in re.findall(r"^\s*(?:\$ )?memfit +([a-z][a-z-]*)", body, re.MULTILINE):
                if command not in known:
                    listed = ", ".join(sorted(known)) or "none yet"
                    yield f"{path.name}: `memfit {command}` is no command; there are: {listed}"


def faults(root: Path) -> list[str]:
    """Every fault found, one line of text each."""
    checks = (check_links, check_strategies, check_readmes, check_commands)
    return [text for check in checks for text in check(root)]


def main() -> int:
    found = faults(Path(__file__).parent.parent)
    for text in found:
        print(text)
    print(f"docs: {len(found)} faults" if found else "docs: in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
