"""The token cache: one file, written once as a stream, complete or absent, read in pieces.

Layout: token numbers (uint16 or uint32) | row starts (uint64, one more than rows) | classes (int32) | JSON |
its length (8 bytes, little-endian) | magic. Each section begins at a multiple of 8.

It is read with ``pread`` instead of a mapping: clean pages of a mapping count as resident memory of the
process, so a measured peak would grow with the data although nothing needs it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from memfit.core.errors import RunFailed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MAGIC = b"memfit01"


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file for writing that appears at ``path`` whole when the block ends, and not at all if it fails.

    It is written as ``<name>.<host>-<pid>.tmp`` beside ``path``; what a killed process of this machine left
    there is removed first.

    Raises:
        RunFailed: the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    host = socket.gethostname()
    for left in path.parent.glob(f"{path.name}.{host}-*.tmp"):
        pid = left.name.removesuffix(".tmp").rpartition("-")[2]
        if pid.isdigit() and not _is_alive(int(pid)):
            left.unlink(missing_ok=True)
    temporary = path.with_name(f"{path.name}.{host}-{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RunFailed("data.disk_full", file=str(path.parent), reason=str(error)) from None
    finally:
        temporary.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class TokenWriter:
    """Appends to the sections of a store; row starts and classes wait in unnamed files on the same disk."""

    def __init__(self, file: IO[bytes], folder: Path, vocabulary_size: int) -> None:
        import numpy as np

        self._np = np
        self._file = file
        self.dtype = np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)
        self._starts: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._classes: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.tokens = self.rows = self.longest_row = 0

    def append(self, ids: list[int], end: int | None = None) -> None:
        """Token numbers at the end of the stream, then ``end``."""
        if end is not None:
            ids = [*ids, end]
        self._file.write(self._np.asarray(ids, dtype=self.dtype).tobytes())
        self.tokens += len(ids)

    def append_row(self, ids: list[int], number: int) -> None:
        """A row of its own with its class."""
        self._starts.write(self.tokens.to_bytes(8, "little"))
        self._classes.write(number.to_bytes(4, "little"))
        self.append(ids)
        self.rows += 1
        self.longest_row = max(self.longest_row, len(ids))

    def finish(self, facts: dict[str, Any]) -> None:
        """Adds the other sections and the facts about the data."""
        self._pad()
        starts_at = self._file.tell()
        self._starts.write(self.tokens.to_bytes(8, "little"))
        self._copy(self._starts)
        classes_at = self._file.tell()
        self._copy(self._classes)
        facts = {
            **facts,
            "dtype": self.dtype.name,
            "tokens": self.tokens,
            "rows": self.rows,
            "longest_row": self.longest_row,
            "starts_at": starts_at,
            "classes_at": classes_at,
        }
        text = json.dumps(facts).encode()
        self._file.write(text + len(text).to_bytes(8, "little") + _MAGIC)

    def close(self) -> None:
        self._starts.close()
        self._classes.close()

    def _copy(self, section: IO[bytes]) -> None:
        section.seek(0)
        shutil.copyfileobj(section, self._file, 1 << 20)
        self._pad()

    def _pad(self) -> None:
        self._file.write(b"\0" * (-self._file.tell() % 8))


class TokenStore:
    """Reads a store piece by piece.

    Attributes:
        facts: what the writer knew (documents, labels) and "tokens", "rows", "longest_row".
    """

    def __init__(self, path: Path) -> None:
        import numpy as np

        self._np = np
        self._descriptor = os.open(path, os.O_RDONLY)
        size = os.fstat(self._descriptor).st_size
        tail = os.pread(self._descriptor, 16, size - 16)
        assert tail[8:] == _MAGIC, path
        length = int.from_bytes(tail[:8], "little")
        self.facts: dict[str, Any] = json.loads(os.pread(self._descriptor, length, size - 16 - length))
        self._dtype = np.dtype(self.facts["dtype"])

    def __del__(self) -> None:
        if (descriptor := getattr(self, "_descriptor", None)) is not None:
            os.close(descriptor)

    def tokens(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Token numbers start … end - 1 of the stream."""
        return self._read(start * self._dtype.itemsize, end - start, self._dtype).astype(self._np.int64)

    def row(self, index: int) -> tuple[npt.NDArray[np.int64], int]:
        """A row's token numbers and class."""
        start, end = self._read(self.facts["starts_at"] + 8 * index, 2, self._np.dtype("<u8"))
        number = self._read(self.facts["classes_at"] + 4 * index, 1, self._np.dtype("<i4"))
        return self.tokens(int(start), int(end)), int(number[0])

    def _read(self, offset: int, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        want = count * dtype.itemsize
        data = os.pread(self._descriptor, want, offset)
        while len(data) < want and (more := os.pread(self._descriptor, want - len(data), offset + len(data))):
            data += more
        return self._np.frombuffer(data, dtype=dtype, count=count)
