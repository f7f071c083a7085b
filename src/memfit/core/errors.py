"""The error tree. Each error says what happened, where, and what to try, in the user's language.

MemfitError                exit status
├── BadInput               2   a job file, option, model or data that cannot be used as given
│   ├── MissingExtra       2   an optional package that is not installed
│   └── DoesNotFit         1   nothing meets the budget; carries the nearest plan
├── CannotSimulate         2   the step does something that has no value without data
├── RunFailed              3   the real run stopped: out of memory, NaN, disk full
└── Interrupted            130 the user stopped it; state is saved
"""

from __future__ import annotations

from typing import Any

from memfit.core.words import say


class MemfitError(Exception):
    """An error whose text lives in the message catalogues (``words/*/*.toml``) under ``key``.

    Args:
        key: the message's name, such as ``"input.unknown_key"``.
        figures: what the message's placeholders stand for. ``file``, ``setting``, ``value`` and
            ``choices`` are the usual ones; those that are ``None`` are left out of the prefix.
    """

    exit_status = 3

    def __init__(self, key: str, **figures: Any) -> None:
        super().__init__(key)
        self.key = key
        self.figures = figures

    def __str__(self) -> str:
        where = [str(self.figures[k]) for k in ("file", "setting") if self.figures.get(k) is not None]
        text = say(self.key, **self.figures)
        return f"{': '.join(where)}: {text}" if where else text

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.key, self.figures))


def _rebuild(kind: type[MemfitError], key: str, figures: dict[str, Any]) -> MemfitError:
    return kind(key, **figures)


class BadInput(MemfitError):
    exit_status = 2


class MissingExtra(BadInput):
    """``MissingExtra(package, extra)``: says which ``pip install`` brings the package."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__("input.missing_extra", package=package, extra=extra)

    def __reduce__(self) -> tuple[Any, ...]:
        return (MissingExtra, (self.figures["package"], self.figures["extra"]))


class DoesNotFit(BadInput):
    exit_status = 1


class CannotSimulate(MemfitError):
    exit_status = 2


class RunFailed(MemfitError):
    exit_status = 3


class Interrupted(MemfitError):
    exit_status = 130
