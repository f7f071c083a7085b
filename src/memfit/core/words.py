"""The message catalogues: every word that a person reads, in English and Chinese.

``words/<language>/<room>.toml`` holds the messages of a room, in tables that become dotted keys. A placeholder
is written as in :meth:`str.format`; three more conversions are known: ``{x:bytes}``, ``{x:seconds}`` and
``{x:percent}``.
"""

from __future__ import annotations

import functools
import locale
import os
import string
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LANGUAGES = ("en", "zh")
_FOLDER = Path(__file__).parent.parent / "words"
_language: str | None = None


def language() -> str:
    """The language in use: the one set, else the environment's locale, else English."""
    if _language is not None:
        return _language
    found = next((os.environ[k] for k in ("LC_ALL", "LC_MESSAGES", "LANG") if os.environ.get(k)), None)
    if found is None:
        found = locale.getlocale()[0] or "en"
    return "zh" if found.lower().startswith("zh") else "en"


def set_language(name: str | None) -> None:
    """Choose ``"en"`` or ``"zh"``; ``None`` returns to the environment's locale."""
    global _language
    if name is not None and name not in LANGUAGES:
        raise ValueError(f"language {name!r}; choose one of {', '.join(LANGUAGES)}")
    _language = name


@functools.cache
def catalogue(name: str) -> Mapping[str, str]:
    """All messages of one language by dotted key."""
    messages: dict[str, str] = {}

    def flatten(prefix: str, table: Mapping[str, Any]) -> None:
        for key, value in table.items():
            dotted = f"{prefix}.{key}" if prefix else key
            if isinstance(value, Mapping):
                flatten(dotted, value)
            else:
                messages[dotted] = value

    for file in sorted((_FOLDER / name).glob("*.toml")):
        flatten("", tomllib.loads(file.read_text(encoding="utf-8")))
    return messages


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        from memfit.core import units

        if format_spec == "bytes":
            return units.show_bytes(value)
        if format_spec == "seconds":
            return units.show_seconds(value)
        if format_spec == "percent":
            return f"{100 * value:.1f} %"
        return super().format_field(value, format_spec)


def say(key: str, /, lang: str | None = None, **figures: Any) -> str:
    """The message ``key`` in the language in use, its placeholders filled.

    Raises:
        KeyError: no catalogue has the key, or a placeholder has no figure (a mistake in the program).
    """
    template = catalogue(lang or language()).get(key)
    if template is None:
        template = catalogue("en")[key]
    return _Formatter().vformat(template, (), figures)


def has(key: str) -> bool:
    """Whether the English catalogue knows ``key``."""
    return key in catalogue("en")
