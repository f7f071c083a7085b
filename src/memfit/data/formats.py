"""One reader per format. Each yields :class:`Document` objects and holds one piece, line or record batch at
a time.

Errors name ``file:line`` (``file:row`` for Parquet, whose rows have no lines).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.core.errors import BadInput, MissingExtra

PIECE_CHARACTERS = 1 << 20
LONGEST_LINE_BYTES = 64 << 20


@dataclass(frozen=True)
class Document:
    """A text, or a piece of a long one (``ends`` is true for the last piece), and its class if it has one."""

    text: str
    label: str | None = None
    ends: bool = True


def text(path: Path) -> Iterator[Document]:
    """A file is a document. A long one comes in pieces of about 1 MiB, cut at line ends where there are
    any."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            piece = file.read(PIECE_CHARACTERS)
            while piece:
                piece += file.readline(PIECE_CHARACTERS)
                following = file.read(PIECE_CHARACTERS)
                yield Document(piece, ends=not following)
                piece = following
    except UnicodeDecodeError as error:
        raise BadInput("data.not_utf8", file=f"{path}:{_line_of_error(path)}", reason=error.reason) from None
    except OSError as error:
        raise BadInput("input.unreadable", file=str(path), reason=str(error)) from None


def jsonl(path: Path, column: str, label: str | None) -> Iterator[Document]:
    """One JSON object a line; ``column`` holds the text. Blank lines are passed over."""
    for number, line in _lines(path):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput("data.broken_row", file=place, reason=str(error)) from None
        if not isinstance(row, dict):
            raise BadInput("data.not_an_object", file=place, value=type(row).__name__)
        for role, name in (("text", column), ("label", label)):
            if name is not None and name not in row:
                raise _no_column(place, role, name, list(row))
        yield _document(place, row[column], None if label is None else row[label], label)


def csv_rows(path: Path, column: str, label: str | None) -> Iterator[Document]:
    """Comma-separated rows under a line of column names (tab-separated in a ``.tsv``); quoted line ends
    allowed."""
    # The module's limit is one for the process and 128 KiB by default: less than an ordinary document.
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_LINE_BYTES))
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    rows = csv.reader((line for _, line in _lines(path)), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise BadInput("data.broken_row", file=f"{path}:{line}", reason=str(error)) from None
        if not row:
            continue
        if names is None:
            names = row
            for role, name in (("text", column), ("label", label)):
                if name is not None and name not in names:
                    raise _no_column(f"{path}:{line}", role, name, names)
            continue
        if len(row) != len(names):
            raise BadInput("data.row_width", file=f"{path}:{line}", value=len(row), expected=len(names))
        yield Document(row[names.index(column)], None if label is None else row[names.index(label)])


def parquet(path: Path, column: str, label: str | None) -> Iterator[Document]:
    """Rows of a Parquet file, 256 at a time, read through a 1 MiB buffer rather than a row group at once."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("pyarrow", "data") from None
    wanted = [name for name in (column, label) if name is not None]
    try:
        file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise BadInput("data.no_parquet", file=str(path), reason=str(error)) from None
    with file:
        for role, name in (("text", column), ("label", label)):
            if name is not None and name not in file.schema_arrow.names:
                raise _no_column(str(path), role, name, file.schema_arrow.names)
        number = 0
        batches = file.iter_batches(batch_size=256, columns=wanted, use_threads=False)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (pyarrow.ArrowException, OSError) as error:
                place = f"{path}:{number + 1}"
                raise BadInput("data.broken_row", file=place, reason=str(error)) from None
            for row in batch.to_pylist():
                number += 1
                yield _document(f"{path}:{number}", row[column], None if label is None else row[label], label)


def labelled_lines(files: list[tuple[str, Path]]) -> Iterator[Document]:
    """One row a line, blank lines passed over; the classes take turns, so that a limited part has them
    all."""
    readers = {name: (line.strip() for _, line in _lines(path)) for name, path in files}
    while readers:
        for name in list(readers):
            line = next((line for line in readers[name] if line), None)
            if line is None:
                del readers[name]
            else:
                yield Document(line, name)


def pieces(document: Document) -> Iterator[Document]:
    """A long document in pieces of at most 2 MiB, so that what is made of one at a time stays small."""
    text, size = document.text, 2 * PIECE_CHARACTERS
    for start in range(0, max(1, len(text)), size):
        last = start + size >= len(text)
        yield Document(text[start : start + size], document.label, document.ends and last)


def _document(place: str, value: Any, label: Any, label_column: str | None) -> Document:
    if not isinstance(value, str):
        raise BadInput("data.text_type", file=place, value=type(value).__name__)
    if label_column is None:
        return Document(value)
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    if not isinstance(label, str | int):
        raise BadInput("data.label_type", file=place, value=type(label).__name__, column=label_column)
    return Document(value, str(int(label) if isinstance(label, bool) else label))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, decoded line with its end) of a file, each line at most 64 MiB."""
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(LONGEST_LINE_BYTES + 1):
                number += 1
                if len(raw) > LONGEST_LINE_BYTES:
                    raise BadInput("data.long_line", file=f"{path}:{number}", limit_bytes=LONGEST_LINE_BYTES)
                try:
                    yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise BadInput("data.not_utf8", file=f"{path}:{number}", reason=error.reason) from None
    except OSError as error:
        raise BadInput("input.unreadable", file=str(path), reason=str(error)) from None


def _line_of_error(path: Path) -> int:
    """The number of the first line that is not UTF-8 (a file that failed as a whole has one)."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                raw.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 1


def _no_column(place: str, role: str, name: str, choices: list[str]) -> BadInput:
    return BadInput("data.no_column", file=place, setting=f"data.columns.{role}", value=name,
                    choices=", ".join(map(str, choices)) or "-")  # fmt: skip
