"""``file.py:function`` factories and the parts that the Python API hands over."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from memfit.core.errors import BadInput
from memfit.core.job import Job
from memfit.core.step import Batch, Step, World


def is_factory(name: str) -> bool:
    """Whether a model's name is ``path/to/file.py:function``."""
    return ".py:" in name and not name.startswith("package:")


def build_step(job: Job, world: World) -> Step:
    """The step of a factory, called without arguments, on ``meta`` in a simulated world.

    Raises:
        BadInput: no such file or function, it raises, or it returns something else than
            (model, example batch, loss).
    """
    import torch

    file, _, name = job.model.name.rpartition(":")
    function = _load_function(Path(file).expanduser(), name)
    if world.simulated:
        context: Any = torch.device("meta")
    else:
        context = torch.device(world.device)
    cuda = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), context:
        torch.manual_seed(job.model.seed)
        try:
            parts = function()
        except (
            Exception
        ) as error:  # a user's code may raise anything; it becomes the user's error, with its place
            raise _explain(error, file, name) from error
    model, batch, loss = _check_parts(parts, file, name)
    return step_from_parts(model, batch, loss, job)


def _load_function(file: Path, name: str) -> Callable[[], Any]:
    if not file.is_file():
        raise BadInput("input.no_file", file=str(file), setting="model.name")
    file = file.resolve()
    module_name = f"memfit_factory_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickling look a class's module up there
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # see build_step
        del sys.modules[module_name]
        raise _explain(error, str(file), name) from error
    finally:
        sys.path.remove(str(file.parent))
    function = getattr(module, name, None)
    if not callable(function):
        raise BadInput("models.no_function", file=str(file), setting="model.name", value=name,
                       choices=", ".join(_functions(module)) or "-")  # fmt: skip
    return function


def _functions(module: ModuleType) -> list[str]:
    own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__}
    return sorted(n for n, v in own.items() if callable(v) and not n.startswith("_"))


def _explain(error: Exception, file: str, function: str) -> BadInput:
    """The error of a user's code: its last line, and the last line of the user's own file that led there."""
    here = str(Path(file).resolve())
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == here]
    line: int | None = lines[-1] if lines else None
    if isinstance(error, SyntaxError) and error.filename == here:
        line = error.lineno
    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
    return BadInput("models.factory_raised", file=file, setting=function, line=line or "?", reason=reason)


def _check_parts(parts: Any, file: str, function: str) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    from torch import nn

    def refuse(got: str) -> BadInput:
        return BadInput("models.factory_returned", file=file, setting=function, value=got)

    if not isinstance(parts, tuple | list) or len(parts) != 3:
        size = f" ({len(parts)})" if isinstance(parts, tuple | list) else ""
        raise refuse(f"{type(parts).__name__}{size}")
    model, batch, loss = parts
    if not isinstance(model, nn.Module) or not callable(loss):
        raise refuse(f"({', '.join(type(p).__name__ for p in parts)})")
    return model, batch, loss


def step_from_parts(
    model: Any, batch: Any, loss: Callable[[Any, Any], Any], job: Job, *, shift: bool | None = None
) -> Step:
    """A step from a model, an example batch and a loss (model, batch) -> scalar mean.

    The batch is any nest of dicts, lists and tuples of tensors whose dim 0 is the rows. Batches of other
    sizes are made from it by repeating or cutting its rows. ``shift``: a dict batch's ``labels`` are the next
    token's; None: they are if the model is one of transformers' causal language models.

    Raises:
        BadInput: the batch has no tensor with rows.
    """
    from memfit.models.batches import count_items, count_rows, map_tensors, split_rows
    from memfit.models.build import optimizer_recipe
    from memfit.models.structure import find_blocks, find_capabilities

    rows = count_rows(batch)
    if shift is None:
        shift = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))

    def make_batch(wanted: int, world: World) -> Batch:
        data = map_tensors(batch, lambda tensor: _resize(tensor, rows, wanted, world))
        return Batch(data, wanted, count_items(data, wanted, shift=shift))

    model.train(job.task.kind == "train")
    blocks = find_blocks(model)
    wanted = job.task.global_batch if job.task.global_batch > 1 else rows
    return Step(
        model=model,
        loss=loss,
        make_batch=make_batch,
        split=lambda whole, sizes: split_rows(whole, sizes, shift=shift),
        global_batch=wanted,
        micro_batch=job.task.micro_batch or wanted,
        optimizer=optimizer_recipe(job),
        blocks=blocks,
        clip_grad_norm=job.task.clip_grad_norm,
        capabilities=find_capabilities(model, blocks, None),
    )


def _resize(tensor: Any, rows: int, wanted: int, world: World) -> Any:
    import torch

    shape = tuple(tensor.shape)
    if shape and shape[0] == rows:
        shape = (wanted, *shape[1:])
    if world.simulated:
        return torch.zeros(shape, dtype=tensor.dtype, device=world.device)
    if shape != tuple(tensor.shape):
        tensor = tensor[torch.arange(wanted, device=tensor.device) % rows]
    return tensor.to(world.device)
