"""Where a model comes from: a catalogue entry, a folder, a file in an installed package, the local hub cache.

Gives a config as a plain dictionary and, where there are any, the weights. Nothing is downloaded, nothing
of the package is imported, no code that comes with a model is run.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.core.errors import BadInput, MissingExtra
from memfit.core.job import Head
from memfit.core.words import say
from memfit.models import entries

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Source:
    """A located model.

    Attributes:
        architecture: ``model_type``.
        config: values for the config class; those left out keep the class's defaults.
        head: what it is for, where the source says so.
        weights: folder with safetensors, or a GGUF file; None: random weights from the config.
        notes: for the report.
    """

    architecture: str
    config: dict[str, Any]
    head: Head | None = None
    weights: Path | None = None
    notes: tuple[str, ...] = ()


def locate(name: str) -> Source:
    """Finds a model by the name of a job file.

    Raises:
        BadInput: nothing is found under the name, or it is no model.
        MissingExtra: reading a GGUF file needs the ``gguf`` package.
    """
    if name.startswith("package:"):
        return _from_path(package_path(name, "model.name"), name)
    if Path(name).expanduser().exists():
        return _from_path(Path(name).expanduser(), name)
    if entries.find(name) is not None:
        entry, notes = entries.resolve(name)
        config = {**entry.config, **dict.fromkeys(entry.none)}
        return Source(entry.architecture, config, entry.head, None, notes)
    if name.startswith((".", "/", "~")):
        raise BadInput("input.no_file", file=name, setting="model.name")
    if _HUB_ID.fullmatch(name):
        return _from_cache(name)
    raise entries.unknown(name)


def package_path(name: str, setting: str) -> Path:
    """The path of ``package:NAME/path`` inside an installed package, which is not imported.

    Raises:
        BadInput: the package is not installed or has no such file.
    """
    package, _, inside = name.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec is not None else []
    if not roots:
        raise BadInput("models.no_package", setting=setting, value=name, package=package)
    for root in roots:
        path = (root / inside).resolve()
        if path.exists() and path.is_relative_to(root.resolve()):
            return path
    there = sorted(p.name for p in roots[0].iterdir() if not p.name.startswith(("_", ".")))
    raise BadInput("models.not_in_package", setting=setting, value=name, choices=", ".join(there))


def _from_path(path: Path, name: str) -> Source:
    if path.suffix == ".gguf":
        return _from_gguf(path)
    if path.is_dir():
        config = path / "config.json"
        if config.is_file():
            weights = path if any(path.glob("*.safetensors")) else None
            notes = () if weights else (say("models.no_weights", name=name),)
            return _from_config(config, weights, notes)
        gguf = sorted(path.glob("*.gguf"))
        if len(gguf) == 1:
            return _from_gguf(gguf[0])
    raise BadInput("models.no_config", setting="model.name", value=name)


def _from_config(file: Path, weights: Path | None, notes: tuple[str, ...] = ()) -> Source:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInput("input.unreadable", file=str(file), reason=str(error)) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise BadInput("models.no_model_type", file=str(file))
    architecture = config.pop("model_type")
    if "auto_map" in config:
        notes = (*notes, say("models.own_code", file=str(file)))
    return Source(architecture, config, None, weights, notes)


def _from_gguf(path: Path) -> Source:
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtra("gguf", "examples")
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        str(path.parent), gguf_file=path.name, local_files_only=True
    ).to_dict()
    return Source(config.pop("model_type"), config, "causal-lm", path)


def _from_cache(name: str) -> Source:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        raise MissingExtra("huggingface_hub", "hf") from None
    found = try_to_load_from_cache(name, "config.json")
    if not isinstance(found, str):
        near = entries.unknown(name).figures["near"]
        key = "models.not_cached_near" if near else "models.not_cached"
        choices = ", ".join(entries.names())
        raise BadInput(key, setting="model.name", value=name, near=near, choices=choices)
    return _from_path(Path(found).parent, name)
