"""Checkpoints: weights, optimizer, random numbers, position in the data. Complete or absent; the newest two
are kept.

A checkpoint is written into a folder with a name of its own, synced, and renamed. Weights stand under the
names that the model had before any strategy, as safetensors; the rest is one torch file that is read back
without unpickling code (``weights_only=True``). Nothing is copied on the way: both writers take the tensors'
own memory.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.weak import WeakIdKeyDictionary

from memfit.core.errors import BadInput, MissingExtra, RunFailed
from memfit.engines.in_process import Prepared
from memfit.run.folder import PREFIX, Loss, complete, kept
from memfit.run.process import one_line

_WEIGHTS, _STATE = "model.safetensors", "state.pt"
_UNFINISHED = ".saving-"
KEPT = 2


class State(msgspec.Struct, kw_only=True):
    """What a checkpoint holds beside weights and optimizer. ``stream``: the data's position (JSON-able)."""

    step: int
    micro_batch: int
    losses: list[Loss]
    stream: dict[str, Any]


# -- names ---------------------------------------------------------------------------------------------------


def original_names(model: torch.nn.Module) -> WeakIdKeyDictionary:
    """The name of each parameter and buffer, taken before strategies put modules elsewhere; a tied one's
    first."""
    names = WeakIdKeyDictionary()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and tensor not in names:
            names[tensor] = name
    return names


def named_tensors(model: torch.nn.Module, names: WeakIdKeyDictionary) -> dict[str, torch.Tensor]:
    """Each tensor of the model's state once, under its original name (new ones under their own)."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            found[names.get(tensor, name)] = tensor
    return found


# -- random numbers ------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """Of Python, numpy and torch (and its cards), in plain types and tensors."""
    import numpy as np

    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(kind), [int(k) for k in keys], int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    import numpy as np

    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


# -- saving --------------------------------------------------------------------------------------------------


def save(folder: Path, prepared: Prepared, names: WeakIdKeyDictionary, state: State) -> Path:
    """Writes a checkpoint and removes all but the newest two.

    Raises:
        RunFailed: it cannot be written (disk full); earlier checkpoints are untouched.
    """
    final = folder / f"{PREFIX}{state.step:08d}"
    temporary = folder / f"{_UNFINISHED}{os.getpid()}"
    reason = None
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _save_weights(prepared.step.model, names, temporary / _WEIGHTS)
        torch.save(_state_dict(prepared, state), temporary / _STATE)
        _sync(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _sync_folder(folder)
    except (OSError, RuntimeError, *_safetensors_errors()) as error:  # torch's writer raises RuntimeError
        reason = one_line(error)
    if reason is not None:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunFailed("run.cannot_save", file=str(folder), step=state.step, reason=reason,
                        free=shutil.disk_usage(folder).free, kept=kept(folder))  # fmt: skip
    for old in complete(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _save_weights(model: torch.nn.Module, names: WeakIdKeyDictionary, path: Path) -> None:
    safetensors = _safetensors()
    storages: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors(model, names).items():
        tensor = tensor.detach()
        key = tensor.untyped_storage().data_ptr()
        # The format knows no strides and no shared memory.
        whole = tensor.is_contiguous() and key not in storages
        tensors[name] = tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
        if key:
            storages.add(key)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "save_pretrained"):
        # So that transformers loads the folder as a model.
        config.save_pretrained(path.parent)


def _state_dict(prepared: Prepared, state: State) -> dict[str, Any]:
    return {
        "version": 1,
        "optimizer": prepared.optimizer.state_dict(),
        "scaler": prepared.scaler.state_dict() if prepared.scaler is not None else None,
        "random": random_state(),
        "run": msgspec.to_builtins(state),
    }


def _sync(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- reading -------------------------------------------------------------------------------------------------


def clear_unfinished(folder: Path) -> None:
    """Removes what a killed run left half-written."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def load(path: Path, prepared: Prepared, names: WeakIdKeyDictionary) -> State:
    """Puts a checkpoint into a freshly prepared step, and the random numbers back where they were.

    Raises:
        BadInput: the files are damaged, or belong to another model.
    """
    _load_weights(path / _WEIGHTS, prepared.step.model, names)
    try:
        found = torch.load(path / _STATE, map_location="cpu", weights_only=True)
        state = msgspec.convert(found["run"], State)
        own = [{k: v for k, v in g.items() if k != "params"} for g in prepared.optimizer.param_groups]
        prepared.optimizer.load_state_dict(found["optimizer"])
        for group, options in zip(prepared.optimizer.param_groups, own, strict=True):
            group.update(options)  # the job's, and this plan's way of walking over the parameters
        if prepared.scaler is not None and found["scaler"] is not None:
            prepared.scaler.load_state_dict(found["scaler"])
        set_random_state(found["random"])
    except (OSError, RuntimeError, KeyError, ValueError, EOFError, pickle.UnpicklingError) as error:
        from memfit.run.memory import is_out_of_memory

        if is_out_of_memory(error):
            raise
        raise BadInput("run.broken_checkpoint", file=str(path), reason=one_line(error)) from None
    return state


def _load_weights(path: Path, model: torch.nn.Module, names: WeakIdKeyDictionary) -> None:
    safetensors = _safetensors()
    mine = named_tensors(model, names)
    try:
        with safetensors.safe_open(str(path), "pt") as file, torch.no_grad():
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            own = {name: tuple(tensor.shape) for name, tensor in mine.items()}
            wrong = sorted(n for n in {**shapes, **own} if shapes.get(n) != own.get(n))
            if wrong:
                listed = ", ".join(wrong[:5]) + (", …" if len(wrong) > 5 else "")
                raise BadInput("run.other_weights", file=str(path), names=listed)
            for name, tensor in mine.items():
                tensor.copy_(file.get_tensor(name))
    except (OSError, *_safetensors_errors()) as error:
        raise BadInput("run.broken_checkpoint", file=str(path.parent), reason=one_line(error)) from None


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise MissingExtra("safetensors", "hf") from None
    return safetensors


def _safetensors_errors() -> tuple[Any, ...]:
    return (_safetensors().SafetensorError,)
