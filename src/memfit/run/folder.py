"""The run folder: everything that a run needs to go on, and everything that it leaves behind.

job.toml  plan.json  plan.full.json.gz  predicted.json.gz      what was to be done
measured.json.gz  verdict.json  result.json                    what came of it
losses.jsonl  incidents.jsonl  log.txt                         along the way
checkpoints/step-00000050/                                     see memfit.run.checkpoint
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from memfit.core.errors import BadInput, RunFailed
from memfit.core.job import Job, read_job, write_job
from memfit.core.plan import Plan, Verdict
from memfit.core.profile import Profile

T = TypeVar("T")
PREFIX = "step-"  # of a complete checkpoint's folder
# What may differ when a run goes on: how it runs and how far, not what it computes.
_FREE_SECTIONS = ("budget", "run")
_FREE_KEYS = ("task.steps",)
_BOUND_KEYS = ("run.seed",)


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the curve. ``items``: what the loss is a mean over; ``micro_batch``: rows at once."""

    step: int
    loss: float
    seconds: float
    items: int
    micro_batch: int


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished run gives back. ``step_seconds``: median of plain steps; ``items_per_second``: tokens
    or rows; ``incidents``: recoveries, as they stand in ``incidents.jsonl``; ``resumed_from``: the step it
    went on
    after."""

    folder: str
    plan: Plan
    measured: Profile
    verdict: Verdict
    losses: tuple[float, ...]
    step_seconds: float
    items_per_second: float
    incidents: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    resumed_from: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The plan's object with ``measured`` and ``verdict`` (see the contract), the curve and the speed."""
        return {
            **self.plan.to_json(),
            "measured": self.measured.to_json(self.plan.budget_bytes),
            "verdict": msgspec.to_builtins(self.verdict),
            "losses": list(self.losses), "items_per_second": self.items_per_second,
            "incidents": list(self.incidents), "notes": list(self.notes), "resumed_from": self.resumed_from,
            "folder": self.folder,
        }  # fmt: skip


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """``result.json``: there once a run has reached its last step."""

    steps: int
    step_seconds: float
    items_per_second: float
    notes: tuple[str, ...] = ()
    resumed_from: int | None = None


class RunFolder:
    """Paths and files of one run. Writing replaces whole files or appends whole lines."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.log = self.path / "log.txt"
        self.job_file = self.path / "job.toml"

    # -- claiming --------------------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder (made if need be) for this process; the lock goes with the process, however it
        ends.

        Raises:
            BadInput: another run holds it, or it cannot be written.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("a+")
        except OSError as error:
            raise BadInput("run.cannot_write", file=str(self.path), setting="run.folder",
                           reason=str(error)) from None  # fmt: skip
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise BadInput("run.locked", file=str(self.path), setting="run.folder",
                               pid=file.read().strip() or "?") from None  # fmt: skip
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def check(self, job: Job) -> None:
        """Raises BadInput where the folder holds something else than this job's run."""
        if self.job_file.is_file():
            different = differences(read_job(self.job_file), job)
            if different:
                raise BadInput("run.other_job", file=str(self.path), setting="run.folder",
                               differences="; ".join(different))  # fmt: skip
        elif self.path.is_dir() and any(p.name not in (".lock", "checkpoints") for p in self.path.iterdir()):
            raise BadInput("run.not_a_run", file=str(self.path), setting="run.folder")

    def begin(self, job: Job, plan: Plan) -> None:
        """Writes down what is to be done. What an earlier, shorter run came to is not the result any more."""
        for name in ("result.json", "verdict.json"):
            (self.path / name).unlink(missing_ok=True)
        self.write(self.job_file.name, write_job(job).encode())
        self.write("plan.json", msgspec.json.format(msgspec.json.encode(plan.to_json()), indent=1))
        self.write("plan.full.json.gz", _packed(plan))
        self.write("predicted.json.gz", _packed(plan.profile))

    # -- reading and writing ---------------------------------------------------------------------------------

    def write(self, name: str, content: bytes) -> None:
        """Replaces a file as a whole.

        Raises:
            RunFailed: the disk is full, or the file cannot be written.
        """
        path = self.path / name
        temporary = path.with_name(f".{name}.new")
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise RunFailed("run.cannot_write", file=str(path), reason=str(error)) from None

    def append(self, name: str, row: Any) -> None:
        """Adds a JSON line. Raises RunFailed as :meth:`write`."""
        path = self.path / name
        try:
            with path.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
        except OSError as error:
            raise RunFailed("run.cannot_write", file=str(path), reason=str(error)) from None

    def write_losses(self, losses: list[Loss]) -> None:
        self.write("losses.jsonl", b"".join(msgspec.json.encode(row) + b"\n" for row in losses))

    def losses(self) -> list[Loss]:
        return self._lines("losses.jsonl", Loss)

    def incidents(self) -> list[dict[str, Any]]:
        return self._lines("incidents.jsonl", dict[str, Any])

    def _lines(self, name: str, kind: Any) -> list[Any]:
        path = self.path / name
        if not path.is_file():
            return []
        return [msgspec.json.decode(line, type=kind) for line in path.read_bytes().splitlines()]

    def write_measured(self, profile: Profile) -> None:
        self.write("measured.json.gz", _packed(profile))

    def measured(self) -> Profile | None:
        return self._packed_file("measured.json.gz", Profile)

    def plan(self) -> Plan | None:
        return self._packed_file("plan.full.json.gz", Plan)

    def _packed_file(self, name: str, kind: type[T]) -> T | None:
        path = self.path / name
        return msgspec.json.decode(gzip.decompress(path.read_bytes()), type=kind) if path.is_file() else None

    def finish(self, verdict: Verdict, summary: Summary) -> None:
        """Writes verdict and summary; with the latter the run counts as done."""
        self.write("verdict.json", msgspec.json.format(msgspec.json.encode(verdict), indent=1))
        self.write("result.json", msgspec.json.encode(summary))

    def result(self) -> RunResult | None:
        """The finished run, or None where it is not finished."""
        path = self.path / "result.json"
        plan, measured = self.plan(), self.measured()
        if not path.is_file() or plan is None or measured is None:
            return None
        summary = msgspec.json.decode(path.read_bytes(), type=Summary)
        return RunResult(
            folder=str(self.path), plan=plan, measured=measured,
            verdict=msgspec.json.decode((self.path / "verdict.json").read_bytes(), type=Verdict),
            losses=tuple(row.loss for row in self.losses()), step_seconds=summary.step_seconds,
            items_per_second=summary.items_per_second, incidents=tuple(self.incidents()), notes=summary.notes,
            resumed_from=summary.resumed_from,
        )  # fmt: skip

    def steps_done(self) -> int:
        """Of a finished run; 0 where none is."""
        path = self.path / "result.json"
        return msgspec.json.decode(path.read_bytes(), type=Summary).steps if path.is_file() else 0


def complete(checkpoints: Path) -> list[Path]:
    """Checkpoints, the oldest first."""
    return sorted(p for p in checkpoints.glob(f"{PREFIX}*") if p.is_dir())


def kept(checkpoints: Path) -> str:
    """The newest checkpoint's path, or "-", for messages."""
    found = complete(checkpoints)
    return str(found[-1]) if found else "-"


def _packed(value: Any) -> bytes:
    return gzip.compress(msgspec.json.encode(value), compresslevel=3, mtime=0)


def default_folder(job: Job) -> Path:
    """``runs/MODEL-KEY``: the same job comes back to the same folder, another one does not."""
    bound = {k: v for k, v in _flat(job).items() if _is_bound(k)}
    key = hashlib.sha256(msgspec.json.encode(bound, order="deterministic", enc_hook=str)).hexdigest()[:8]
    name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(job.model.name).name).strip("-.")
    return Path("runs") / f"{name or 'model'}-{key}"


def differences(there: Job, here: Job) -> list[str]:
    """Settings that make two jobs different runs, each with both values."""
    old, new = _flat(there), _flat(here)
    keys = [k for k in {**old, **new} if _is_bound(k) and old.get(k) != new.get(k)]
    return [f"{k}: {old.get(k)!r} -> {new.get(k)!r}" for k in sorted(keys)]


def _is_bound(key: str) -> bool:
    if key in _BOUND_KEYS:
        return True
    return key.partition(".")[0] not in _FREE_SECTIONS and key not in _FREE_KEYS


def _flat(job: Job) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, content in job.to_dict().items():
        if isinstance(content, dict):
            flat |= {f"{section}.{key}": value for key, value in content.items()}
        else:
            flat[section] = [dict(sorted(entry.items())) for entry in content]
    return flat
