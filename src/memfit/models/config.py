"""From a located model and a job's overrides to a Hugging Face config object."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from memfit.core.errors import BadInput, MissingExtra
from memfit.core.job import Head
from memfit.models.locate import Source

# Which of transformers' tables holds the class for a head, by model_type.
_TABLES: dict[Head, tuple[str, ...]] = {
    "causal-lm": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
    "masked-lm": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",),
    "sequence-classification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",),
    "image-classification": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",),
    "seq2seq": ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "vision-language": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",),
}
_DEPTH = ("num_hidden_layers", "n_layer", "num_layers")


def class_names(architecture: str) -> dict[Head, str]:
    """The model class for each head that transformers has for a ``model_type``."""
    from transformers.models.auto import modeling_auto

    found: dict[Head, str] = {}
    for head, tables in _TABLES.items():
        for table in tables:
            name = getattr(modeling_auto, table, {}).get(architecture)
            if name is not None:
                found.setdefault(head, name[0] if isinstance(name, list | tuple) else name)
    return found


def choose_head(source: Source, asked: Head | None, labels: int | None) -> Head:
    """The head: the job's, else the source's, else what the config's ``architectures`` says.

    Raises:
        BadInput: the architecture has no such head, or nothing says which of several is meant.
    """
    possible = class_names(source.architecture)
    if not possible:
        raise BadInput("models.no_class", setting="model.name", value=source.architecture)
    head = asked or source.head
    if head is None:
        written = source.config.get("architectures") or []
        head = next((h for h, name in possible.items() if name in written), None)
    if head is None and labels is not None and "sequence-classification" in possible:
        head = "sequence-classification"
    if head is None and len(possible) == 1:
        head = next(iter(possible))
    if head is None or head not in possible:
        raise BadInput("models.head", setting="model.head", value=head, architecture=source.architecture,
                       choices=", ".join(possible))  # fmt: skip
    return head


def make_config(source: Source, overrides: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
    """The config object: the source's values, ``more`` (the task's), then the user's overrides.

    ``overrides`` may nest (``{text_config: {…}}``) or use dots (``"text_config.num_hidden_layers"``). Lists
    with one value per layer follow a changed number of layers.

    Raises:
        BadInput: an override names no key of the config, or its value is refused by the config's own checks.
    """
    from huggingface_hub.errors import StrictDataclassError

    kind = _config_class(source.architecture)
    base = {k: v for k, v in source.config.items() if k not in ("architectures", "auto_map", "model_type")}
    plain = kind(**_copy(base))
    flat = dict(_flatten(overrides, plain))
    _check_keys(flat, plain)
    merged = _copy(base)
    for key, value in more.items():
        _put(merged, key, value)
    for key, value in flat.items():
        _put(merged, key, value)
    _follow_depth(merged, flat, plain)
    _follow_vocabulary(merged, flat, plain)
    try:
        return kind(**merged)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise BadInput("models.override_refused", setting="model.overrides", reason=reason,
                       value=", ".join(f"{k} = {v!r}" for k, v in flat.items())) from None  # fmt: skip


def _config_class(architecture: str) -> Any:
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        raise MissingExtra("transformers", "hf") from None
    if architecture not in CONFIG_MAPPING:
        raise BadInput("models.no_class", setting="model.name", value=architecture)
    return CONFIG_MAPPING[architecture]


def known_keys(config: Any, prefix: str = "") -> set[str]:
    """The keys of a config and of its sub-configs, dotted."""
    parts = set(type(config).sub_configs)
    keys = {f.name for f in dataclasses.fields(config)} | set(vars(config)) | set(type(config).attribute_map)
    found = {prefix + k for k in keys if not k.startswith("_") and k != "transformers_version"}
    for part in parts:
        inner = getattr(config, part, None)
        if dataclasses.is_dataclass(inner):
            found |= known_keys(inner, f"{prefix}{part}.")
    return found


def _flatten(table: Mapping[str, Any], config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        inner = getattr(config, key, None) if key in type(config).sub_configs else None
        if isinstance(value, Mapping) and dataclasses.is_dataclass(inner):
            yield from _flatten(value, inner, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _check_keys(flat: Mapping[str, Any], config: Any) -> None:
    valid = known_keys(config)
    for key in flat:
        if key in valid:
            continue
        inside = sorted(v for v in valid if v.endswith(f".{key}"))
        near = inside or difflib.get_close_matches(key, sorted(valid), n=3)
        own = sorted(k for k in valid if "." not in k)
        raise BadInput("models.unknown_override_near" if near else "models.unknown_override",
                       setting=f"model.overrides.{key}", value=key, near=", ".join(near),
                       choices=", ".join(own))  # fmt: skip


def _put(table: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
    table[last] = value


def _follow_depth(merged: dict[str, Any], flat: Mapping[str, Any], plain: Any) -> None:
    """Trims (or drops, so that the class computes it anew) each list that has one value per layer."""
    for key, value in flat.items():
        *parents, last = key.split(".")
        if last not in _DEPTH or not isinstance(value, int):
            continue
        config, table = plain, merged
        for parent in parents:
            config, table = getattr(config, parent), table[parent]
        before = getattr(config, last)
        for name, content in list(table.items()):
            given = ".".join([*parents, name]) in flat
            if isinstance(content, list) and len(content) == before and not given:
                if value <= before:
                    table[name] = content[:value]
                else:
                    del table[name]


def _follow_vocabulary(merged: dict[str, Any], flat: Mapping[str, Any], plain: Any) -> None:
    """Moves token ids that a smaller vocabulary no longer has: padding and the like go, the ids that mark
    images and videos take the last places."""
    rows = [v for k, v in flat.items() if k.split(".")[-1] == "vocab_size" and isinstance(v, int)]
    if not rows:
        return
    last = min(rows)
    for key in sorted(known_keys(plain)):
        value = plain
        for part in key.split("."):
            value = getattr(value, part, None)
        name = key.split(".")[-1]
        if key in flat or not re.search(r"(^|_)(token_id|token_index)$", name):
            continue
        highest = max(value, default=0) if isinstance(value, list) else value
        if not isinstance(highest, int) or highest < min(rows):
            continue
        if re.match(r"image|video|vision", name):
            last -= 1
            _put(merged, key, last)
        else:
            _put(merged, key, None)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return list(value) if isinstance(value, list) else value
