"""The catalogue of models: ``catalogue/*.toml``, read without torch.

A closed model (one whose weights and architecture are not published) is an entry too: it names an open
sibling of the same family, which is what is built in its place, with a note that says so.
"""

from __future__ import annotations

import difflib
import functools
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from memfit.core.errors import BadInput
from memfit.core.job import Head
from memfit.core.words import say

_FOLDER = Path(__file__).parent / "catalogue"


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model of the catalogue.

    Attributes:
        name: what a job file writes as ``model.name``.
        aliases: hub ids and other spellings; compared without regard to case.
        architecture: Hugging Face's ``model_type``.
        head: what the model is trained for unless a job says otherwise.
        config: the values of the architecture's config that differ from its class's defaults.
        none: keys of the config that are None and would not be by default (TOML cannot write it).
        parameters: exact number, the head included, tied tensors once.
        released_dtype: of the published weights.
        positions: longest sequence in tokens that the release names; None where length means nothing.
        vocabulary: rows of the embedding (classes, for image models).
        sources: where the figures come from.
        unverified: what could not be checked against a source.
        closed, sibling: a closed model, and the open one that stands in for it.
    """

    name: str
    title: str = ""
    aliases: tuple[str, ...] = ()
    architecture: str = ""
    head: Head = "causal-lm"
    config: dict[str, Any] = {}
    none: tuple[str, ...] = ()
    parameters: int = 0
    released_dtype: str = "bfloat16"
    positions: int | None = None
    vocabulary: int = 0
    sources: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    closed: bool = False
    sibling: str | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: tuple[Entry, ...]


@functools.cache
def _entries() -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for file in sorted(_FOLDER.glob("*.toml")):
        for item in msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), _File).model:
            assert item.name not in found, f"{file}: {item.name} stands twice in the catalogue"
            found[item.name] = item
    return found


@functools.cache
def _spellings() -> dict[str, str]:
    return {s.lower(): e.name for e in _entries().values() for s in (e.name, *e.aliases)}


def names() -> list[str]:
    """The catalogue's names, open models first."""
    return sorted(_entries(), key=lambda n: (_entries()[n].closed, n))


def find(name: str) -> Entry | None:
    """The entry of a name or alias, or None."""
    spelled = _spellings().get(name.lower())
    return None if spelled is None else _entries()[spelled]


def entry(name: str) -> Entry:
    """The entry of a name or alias.

    Raises:
        BadInput: the catalogue does not know the name; the nearest names are given.
    """
    found = find(name)
    if found is None:
        raise unknown(name)
    return found


def resolve(name: str) -> tuple[Entry, tuple[str, ...]]:
    """The open entry to build for a name, and notes (a closed model gives its open sibling and says so)."""
    found = entry(name)
    if not found.closed:
        return found, ()
    assert found.sibling is not None
    open_one = _entries()[found.sibling]
    return open_one, (say("models.closed", name=found.title or found.name, sibling=open_one.name),)


def table() -> list[dict[str, Any]]:
    """One row of plain values for each model, for ``memfit models``."""
    return [
        {
            "name": e.name,
            "title": e.title or e.name,
            "architecture": e.architecture,
            "head": e.head if not e.closed else None,
            "parameters": e.parameters or None,
            "released_dtype": e.released_dtype if not e.closed else None,
            "positions": e.positions,
            "vocabulary": e.vocabulary or None,
            "closed": e.closed,
            "sibling": e.sibling,
            "aliases": list(e.aliases),
            "sources": list(e.sources),
            "unverified": list(e.unverified),
        }
        for e in (_entries()[n] for n in names())
    ]


def unknown(name: str, setting: str = "model.name") -> BadInput:
    """The error for a name that means nothing: names the nearest spelling and the catalogue."""
    near = difflib.get_close_matches(name.lower(), list(_spellings()), n=1, cutoff=0.5)
    key = "input.unknown_name_near" if near else "input.unknown_name"
    return BadInput(key, setting=setting, value=name, near=_spellings()[near[0]] if near else "",
                    choices=", ".join(names()))  # fmt: skip
