"""The job: what a user wants to run, typed, read from TOML, unknown keys refused."""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from memfit.core.errors import BadInput
from memfit.core.units import parse_bytes

Dtype = Literal["float32", "bfloat16", "float16"]
Attention = Literal["auto", "eager", "sdpa", "flash-2"]
Kind = Literal["train", "infer", "load"]
Head = Literal[
    "causal-lm", "masked-lm", "sequence-classification", "image-classification", "seq2seq", "vision-language"
]


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is run. ``name``: a catalogue name, a folder with ``config.json``, ``package:NAME/path`` (a file or
    folder inside an installed package) or ``file.py:factory``."""

    name: str
    dtype: Dtype = "float32"
    attention: Attention = "auto"
    head: Head | None = None
    overrides: dict[str, Any] = {}
    seed: int = 0


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is done with it. Lengths in tokens, batches in rows, ``learning_rate`` per step."""

    kind: Kind = "train"
    sequence_length: int | None = None
    micro_batch: int | None = None
    global_batch: int = 1
    optimizer: str = "adamw"
    optimizer_options: dict[str, Any] = {}
    learning_rate: float = 3e-4
    warmup_steps: int = 0
    clip_grad_norm: float | None = None
    steps: int = 100
    labels: int | None = None
    input_length: int | None = None
    output_length: int | None = None
    batch: int | None = None
    images: tuple[int, int] | None = None
    images_per_row: int = 1


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Real input for ``fit``. ``path``: a file or folder; ``stdlib:`` (Python's own sources) or
    ``package:NAME/path``. ``format``: text | jsonl | csv | parquet | labelled-lines."""

    path: str | None = None
    format: Literal["text", "jsonl", "csv", "parquet", "labelled-lines", "images"] | None = None
    classes: dict[str, str] = {}
    columns: dict[str, str] = {}
    tokenizer: str | None = None
    vocabulary: int | None = None
    limit: int | None = None
    shuffle: bool = True
    seed: int = 0


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What may be used. ``memory``: of one device; ``margin``: the share of it that a plan leaves free."""

    device: str = "auto"
    memory: str | int | None = None
    host_memory: str | int | None = None
    devices: int = 1
    allow: tuple[str, ...] = ()
    margin: float = 0.03

    def memory_bytes(self, file: str | None = None) -> int | None:
        return None if self.memory is None else parse_bytes(self.memory, key="budget.memory", file=file)

    def host_memory_bytes(self, file: str | None = None) -> int | None:
        if self.host_memory is None:
            return None
        return parse_bytes(self.host_memory, key="budget.host_memory", file=file)


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How ``fit`` runs. ``folder``: where results go; ``save_every``: steps between checkpoints (0: at the end
    only); ``hard_limit``: hold the process to the budget by the operating system (CPU)."""

    folder: str | None = None
    save_every: int = 50
    hard_limit: bool = True
    threads: int | None = None
    seed: int = 0


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One job. ``strategies`` are tables with ``name`` and that strategy's own options."""

    model: Model
    task: Task = Task()
    data: Data = Data()
    budget: Budget = Budget()
    run: Run = Run()
    strategy: tuple[dict[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": Model, "task": Task, "data": Data, "budget": Budget, "run": Run,
}  # fmt: skip


def read_job(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Job:
    """A job from a TOML file, with ``section.key=value`` overrides applied on top.

    Raises:
        BadInput: the file is missing or no TOML, a key is unknown, a value has the wrong type or range.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInput("input.no_file", file=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("input.unreadable", file=str(path), reason=str(error)) from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput("input.no_toml", file=str(path), reason=str(error)) from None
    return make_job(table, overrides, file=str(path))


def make_job(
    table: dict[str, Any], overrides: list[str] | tuple[str, ...] = (), file: str | None = None
) -> Job:
    """A job from nested dictionaries, as TOML gives them. Raises :class:`BadInput`."""
    table = {k: dict(v) if isinstance(v, dict) else v for k, v in table.items()}
    for text in overrides:
        _override(table, text)
    _check_keys(table, file)
    try:
        job = msgspec.convert(table, Job)
    except msgspec.ValidationError as error:
        raise _explain(error, table, file) from None
    _check_ranges(job, file)
    return job


def _override(table: dict[str, Any], text: str) -> None:
    name, sign, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not sign or not dot or not key:
        raise BadInput("input.bad_set", file="--set", value=text)
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    target = table.setdefault(section, {})
    *parents, last = key.split(".")
    for parent in parents:
        target = target.setdefault(parent, {})
    target[last] = parsed


def _check_keys(table: dict[str, Any], file: str | None) -> None:
    def refuse(setting: str, key: str, valid: list[str]) -> None:
        near = difflib.get_close_matches(key, valid, n=1)
        message = "input.unknown_key_near" if near else "input.unknown_key"
        raise BadInput(message, file=file, setting=setting, value=key, near=near[0] if near else "",
                       choices=", ".join(valid))  # fmt: skip

    sections = [*_SECTIONS, "strategy"]
    for section, content in table.items():
        if section not in sections:
            refuse(section, section, sections)
        if section == "strategy":
            if not isinstance(content, list | tuple) or not all(isinstance(s, dict) for s in content):
                raise BadInput("input.strategy_table", file=file, setting="strategy", value=content)
            for number, entry in enumerate(content):
                if not isinstance(entry.get("name"), str):
                    raise BadInput("input.strategy_name", file=file, setting=f"strategy[{number}].name")
            continue
        if not isinstance(content, dict):
            raise BadInput("input.not_a_table", file=file, setting=section, value=content)
        valid = list(_SECTIONS[section].__struct_fields__)
        for key in content:
            if key not in valid:
                refuse(f"{section}.{key}", key, valid)
    if "model" not in table or "name" not in table["model"]:
        raise BadInput("input.required", file=file, setting="model.name")


def _explain(error: msgspec.ValidationError, table: dict[str, Any], file: str | None) -> BadInput:
    text = str(error)
    match = re.search(r"\$\.?([\w.\[\]]*)`?$", text)
    setting = match[1] if match else ""
    value: Any = table
    for part in re.findall(r"\w+", setting):
        value = (
            value[int(part)]
            if isinstance(value, list | tuple)
            else value.get(part)
            if isinstance(value, dict)
            else None
        )
    section, _, key = setting.partition(".")
    choices = ""
    if section in _SECTIONS and key in _SECTIONS[section].__struct_fields__:
        choices = re.sub(r"typing\.|NoneType|\s*\|\s*None", "", str(_SECTIONS[section].__annotations__[key]))
        aliases = {"Dtype": Dtype, "Attention": Attention, "Kind": Kind, "Head": Head}
        for alias, literal in aliases.items():
            if choices.strip() == alias:
                choices = ", ".join(literal.__args__)  # type: ignore[attr-defined]
    return BadInput("input.wrong_type", file=file, setting=setting or None, value=value, choices=choices,
                    reason=text.split(" - at")[0])  # fmt: skip


def _check_ranges(job: Job, file: str | None) -> None:
    for section, keys in {
        "task": ("sequence_length", "micro_batch", "global_batch", "steps", "labels", "input_length",
                 "output_length", "batch", "images_per_row"),
        "budget": ("devices",),
        "data": ("vocabulary", "limit"),
        "run": ("threads",),
    }.items():  # fmt: skip
        for key in keys:
            value = getattr(getattr(job, section), key)
            if value is not None and value < 1:
                raise BadInput("input.positive", file=file, setting=f"{section}.{key}", value=value)
    if job.task.learning_rate <= 0:
        raise BadInput(
            "input.positive", file=file, setting="task.learning_rate", value=job.task.learning_rate
        )
    if not 0 <= job.budget.margin < 0.9:
        raise BadInput("input.margin", file=file, setting="budget.margin", value=job.budget.margin)
    if job.task.micro_batch is not None and job.task.micro_batch > job.task.global_batch:
        raise BadInput("input.micro_above_global", file=file, setting="task.micro_batch",
                       value=job.task.micro_batch, limit=job.task.global_batch)  # fmt: skip
    job.budget.memory_bytes(file)
    job.budget.host_memory_bytes(file)


def write_job(job: Job) -> str:
    """The job as TOML text; :func:`read_job` gives an equal job back."""
    lines: list[str] = []
    for section in _SECTIONS:
        content = {k: v for k, v in msgspec.to_builtins(getattr(job, section)).items() if v is not None}
        default = msgspec.to_builtins(_SECTIONS[section]()) if section != "model" else {}
        content = {k: v for k, v in content.items() if section == "model" or default.get(k) != v}
        if content:
            lines += [f"[{section}]", *(f"{k} = {_toml(v)}" for k, v in content.items()), ""]
    for entry in job.strategy:
        lines += ["[[strategy]]", *(f"{k} = {_toml(v)}" for k, v in entry.items() if v is not None), ""]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(f"{msgspec.json.encode(k).decode()} = {_toml(v)}" for k, v in value.items())
            + " }"
        )
    raise TypeError(f"{value!r} has no TOML form")
