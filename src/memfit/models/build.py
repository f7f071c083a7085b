"""From a job to its unmodified :class:`~memfit.core.step.Step`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.core.errors import BadInput, MissingExtra
from memfit.core.job import Head as HeadName
from memfit.core.job import Job
from memfit.core.step import OptimizerRecipe, Step, World
from memfit.core.words import say
from memfit.models.config import choose_head, class_names, make_config
from memfit.models.locate import Source, locate

_DEFAULT_LENGTH = 2048  # tokens; where a job does not say and the model has more positions
_ATTENTION = {"eager": "eager", "sdpa": "sdpa", "flash-2": "flash_attention_2"}


@dataclass(frozen=True)
class Built:
    """A model and what was learned on the way. ``weights``: where real weights come from, else None."""

    model: Any
    config: Any
    head: HeadName
    weights: Path | None
    notes: tuple[str, ...]


def build_step(job: Job, world: World) -> Step:
    """One optimizer step as the user would write it, before any strategy.

    In a simulated world the model has no weights (``meta``); in a real one it has those of its folder, or
    random ones from ``job.model.seed``. Inference jobs of (vision-)language models give
    a step whose batch has no labels and whose ``loss`` is the logits of the last position.

    Raises:
        BadInput: name, overrides, attention or lengths cannot be used; a factory fails.
        MissingExtra: transformers or gguf is not installed.
    """
    from memfit.models import factory

    if factory.is_factory(job.model.name):
        return factory.build_step(job, world)
    from memfit.models.structure import find_blocks, find_capabilities, find_head
    from memfit.models.tasks import make_prompts, make_task

    built = build_model(job, world)
    model, config = built.model, built.config
    length, notes = _length(job, built)
    training = job.task.kind == "train"
    if training or built.head != "causal-lm":
        task = make_task(built.head, config, job, length)
    else:
        task = make_prompts(config, job, length)
    blocks = find_blocks(model)
    head = find_head(model, task.shift) if built.head in ("causal-lm", "masked-lm") else None
    rows = job.task.global_batch if training else job.task.batch or job.task.global_batch
    return Step(
        model=model,
        loss=task.loss,
        make_batch=task.make_batch,
        split=task.split,
        global_batch=rows,
        micro_batch=job.task.micro_batch or rows,
        optimizer=optimizer_recipe(job),
        blocks=blocks,
        head=head,
        clip_grad_norm=job.task.clip_grad_norm,
        capabilities=find_capabilities(model, blocks, head),
        notes=(*built.notes, *notes),
    )


def optimizer_recipe(job: Job) -> OptimizerRecipe:
    """The job's optimizer, its learning rate among the options."""
    return OptimizerRecipe(job.task.optimizer, {"lr": job.task.learning_rate, **job.task.optimizer_options})


def build_model(job: Job, world: World) -> Built:
    """The model of a job, in training mode for training jobs and evaluation mode for others."""
    source = locate(job.model.name)
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf") from None
    head = choose_head(source, job.model.head, job.task.labels)
    more: dict[str, Any] = {}
    if job.task.labels is not None and head in ("sequence-classification", "image-classification"):
        more["num_labels"] = job.task.labels
    config = make_config(source, job.model.overrides, more)
    if job.task.kind == "train":
        _set_everywhere(config, "use_cache", False)
    kind = getattr(transformers, class_names(source.architecture)[head])
    attention, notes = _attention(job, world, kind)
    model, more_notes = _instantiate(kind, config, source, job, world, attention)
    model.train(job.task.kind == "train")
    notes = (*source.notes, *notes, *more_notes)
    experts = getattr(config.get_text_config(), "_experts_implementation", None)
    if experts is not None and any("experts" in name for name, _ in model.named_parameters()):
        notes = (*notes, say("models.experts", implementation=experts))
    return Built(model, config, head, source.weights, notes)


def _set_everywhere(config: Any, key: str, value: Any) -> None:
    for part in (config, *(getattr(config, name, None) for name in type(config).sub_configs)):
        if part is not None and hasattr(part, key):
            setattr(part, key, value)


def _attention(job: Job, world: World, kind: Any) -> tuple[str | None, tuple[str, ...]]:
    """transformers' name of the attention to ask for (None: its own choice), and notes.

    Raises:
        BadInput: the class lacks that attention, or flash-attn is needed and not installed.
    """
    asked = job.model.attention
    if asked == "auto":
        return ("sdpa" if kind._supports_sdpa else "eager"), ()
    supports = {"eager": True, "sdpa": kind._supports_sdpa, "flash-2": kind._supports_flash_attn}
    if not supports[asked]:
        raise BadInput("models.attention", setting="model.attention", value=asked, model=kind.__name__,
                       choices=", ".join(a for a, ok in supports.items() if ok))  # fmt: skip
    if asked == "flash-2" and importlib.util.find_spec("flash_attn") is None:
        if not world.simulated:
            raise BadInput("models.no_flash", setting="model.attention", value=asked)
        # The simulator gives scaled_dot_product_attention the target's flash kernel, which keeps the same
        # tensors.
        return "sdpa", (say("models.flash_simulated"),)
    return _ATTENTION[asked], ()


def _instantiate(
    kind: Any, config: Any, source: Source, job: Job, world: World, attention: str | None
) -> tuple[Any, tuple[str, ...]]:
    """The model object and notes: without weights, with those of a file, or with random ones."""
    import torch
    from transformers import initialization

    dtype = getattr(torch, job.model.dtype)
    if world.simulated:
        with initialization.no_init_weights(), torch.device("meta"):
            model = kind._from_config(config, dtype=dtype, attn_implementation=attention)
        model.tie_weights()  # skipped with the initialisation; without it tied tensors would count twice
        return model, ()
    cuda = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(job.model.seed)
        if source.weights is None:
            with torch.device(world.device):
                return kind._from_config(config, dtype=dtype, attn_implementation=attention), ()
        return _load(kind, config, source.weights, dtype, world, attention)


def _load(
    kind: Any, config: Any, weights: Path, dtype: Any, world: World, attention: str | None
) -> tuple[Any, tuple[str, ...]]:
    """Reads real weights: safetensors or GGUF, never a pickle, never code that comes with them."""
    from safetensors import SafetensorError

    folder = weights if weights.is_dir() else weights.parent
    kinds: dict[str, Any] = {"use_safetensors": True} if weights.is_dir() else {"gguf_file": weights.name}
    try:
        model, info = kind.from_pretrained(
            str(folder), config=config, dtype=dtype, attn_implementation=attention, local_files_only=True,
            output_loading_info=True, **kinds,
        )  # fmt: skip
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise BadInput("models.weights", file=str(weights), setting="model.name", reason=reason) from error
    notes = []
    for key in ("missing_keys", "unexpected_keys"):
        found = sorted(info[key])
        if found:
            notes.append(say(f"models.{key}", count=len(found), first=found[0]))
    return model.to(world.device), tuple(notes)


def _length(job: Job, built: Built) -> tuple[int, tuple[str, ...]]:
    """Tokens of a row, and notes.

    Raises:
        BadInput: more tokens than a model with a table of positions has entries in it.
    """
    if built.head == "image-classification":
        return 0, ()
    asked = job.task.sequence_length if job.task.kind == "train" else job.task.input_length
    setting = "task.sequence_length" if job.task.kind == "train" else "task.input_length"
    text = built.config.get_text_config()
    names = ("max_target_positions", "n_positions", "max_position_embeddings")
    positions = next((getattr(text, n) for n in names if getattr(text, n, None)), None)
    if asked is None:
        assumed = min(positions or _DEFAULT_LENGTH, _DEFAULT_LENGTH)
        return assumed, (say("models.length_assumed", length=assumed, setting=setting),)
    if positions is None or asked <= positions:
        return asked, ()
    if _has_position_table(built.model, positions):
        raise BadInput("models.too_long", setting=setting, value=asked, positions=positions)
    return asked, (say("models.beyond_positions", length=asked, positions=positions),)


def _has_position_table(model: Any, positions: int) -> bool:
    from torch import nn

    return any(
        isinstance(m, nn.Embedding) and m.num_embeddings == positions and ("pos" in n or n.endswith("wpe"))
        for n, m in model.named_modules()
    )
