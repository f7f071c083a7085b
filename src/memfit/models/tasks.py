"""What each head is fed and what its loss is a mean over.

The losses are the models' own (``labels`` goes in, ``.loss`` comes out), so that what is simulated is what
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.core.job import Head as HeadName
from memfit.core.job import Job
from memfit.core.step import Batch, World
from memfit.models.batches import IGNORED, count_items, split_rows

MASKED_EVERY = (
    7  # one label in 7 positions: close to BERT's 15 % and the same number on fake and real tensors
)


@dataclass(frozen=True)
class Task:
    """How a head is fed. ``shift``: labels are the next token's."""

    make_batch: Callable[[int, World], Batch]
    split: Callable[[Batch, list[int]], list[Batch]]
    loss: Callable[[Any, Any], Any]
    shift: bool = False


def model_loss(model: Any, data: Any) -> Any:
    """The model's own mean loss over the labels in ``data`` (a scalar)."""
    return model(**data).loss


def make_task(head: HeadName, config: Any, job: Job, length: int) -> Task:
    """The task of a Hugging Face model for training on rows of ``length`` tokens (or images)."""
    seed = job.model.seed
    if head == "vision-language":
        from memfit.models import vision_language

        return vision_language.make_task(config, job, length)
    make: dict[HeadName, Callable[[int, World], dict[str, torch.Tensor]]] = {
        "causal-lm": lambda rows, world: _causal(rows, world, config, length, seed),
        "masked-lm": lambda rows, world: _masked(rows, world, config, length, seed),
        "sequence-classification": lambda rows, world: _classified_text(rows, world, config, length, seed),
        "image-classification": lambda rows, world: _classified_images(rows, world, config, job, seed),
        "seq2seq": lambda rows, world: _seq2seq(rows, world, config, job, length, seed),
    }
    shift = head == "causal-lm"

    def make_batch(rows: int, world: World) -> Batch:
        data = make[head](rows, world)
        items = (
            rows * -(-length // MASKED_EVERY) if head == "masked-lm" else count_items(data, rows, shift=shift)
        )
        return Batch(data, rows, items)

    return Task(make_batch, lambda batch, sizes: split_rows(batch, sizes, shift=shift), model_loss, shift)


def make_prompts(config: Any, job: Job, length: int) -> Task:
    """The task of an inference job: prompts of ``length`` tokens; ``loss`` gives the logits of the last
    position."""
    vocabulary = config.get_text_config().vocab_size

    def make_batch(rows: int, world: World) -> Batch:
        ids = whole_numbers((rows, length), vocabulary, world, job.model.seed)
        return Batch({"input_ids": ids}, rows, rows)

    def logits(model: Any, data: Any) -> Any:
        return model(**data, logits_to_keep=1).logits

    return Task(make_batch, split_rows, logits)


def whole_numbers(shape: tuple[int, ...], below: int, world: World, seed: int) -> torch.Tensor:
    """int64 of a shape, in [0, below): drawn from the seed, or shapes only in a simulated world."""
    if world.simulated:
        return torch.zeros(shape, dtype=torch.int64, device=world.device)
    generator = torch.Generator(device=world.device).manual_seed(seed)
    return torch.randint(below, shape, generator=generator, device=world.device)


def real_numbers(shape: tuple[int, ...], dtype: torch.dtype, world: World, seed: int) -> torch.Tensor:
    """Standard normal numbers of a shape, drawn from the seed, or shapes only in a simulated world."""
    if world.simulated:
        return torch.zeros(shape, dtype=dtype, device=world.device)
    generator = torch.Generator(device=world.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=world.device).to(dtype)


def _causal(rows: int, world: World, config: Any, length: int, seed: int) -> dict[str, torch.Tensor]:
    ids = whole_numbers((rows, length), config.get_text_config().vocab_size, world, seed)
    return {"input_ids": ids, "labels": ids.clone()}


def _masked(rows: int, world: World, config: Any, length: int, seed: int) -> dict[str, torch.Tensor]:
    ids = whole_numbers((rows, length), config.vocab_size, world, seed)
    labels = torch.full((rows, length), IGNORED, dtype=torch.int64, device=world.device)
    labels[:, ::MASKED_EVERY] = ids[:, ::MASKED_EVERY]
    return {"input_ids": ids, "labels": labels}


def _classified_text(rows: int, world: World, config: Any, length: int, seed: int) -> dict[str, torch.Tensor]:
    ids = whole_numbers((rows, length), config.vocab_size, world, seed)
    return {"input_ids": ids, "labels": whole_numbers((rows,), config.num_labels, world, seed + 1)}


def image_size(config: Any, job: Job) -> tuple[int, int]:
    """Width and height in pixels: the job's, else the model's own, else ImageNet's 224."""
    if job.task.images is not None:
        return job.task.images
    own = getattr(config, "image_size", None) or 224
    width, height = (own[1], own[0]) if isinstance(own, list | tuple) else (own, own)
    return int(width), int(height)


def _classified_images(rows: int, world: World, config: Any, job: Job, seed: int) -> dict[str, torch.Tensor]:
    width, height = image_size(config, job)
    shape = (rows, config.num_channels, height, width)
    pixels = real_numbers(shape, getattr(torch, job.model.dtype), world, seed)
    return {"pixel_values": pixels, "labels": whole_numbers((rows,), config.num_labels, world, seed + 1)}


def _seq2seq(
    rows: int, world: World, config: Any, job: Job, length: int, seed: int
) -> dict[str, torch.Tensor]:
    labels = whole_numbers((rows, length), config.vocab_size, world, seed)
    if hasattr(config, "num_mel_bins"):
        # Whisper's encoder halves its input's length once, so its positions are half the frames of 30
        # seconds.
        shape = (rows, config.num_mel_bins, 2 * config.max_source_positions)
        return {
            "input_features": real_numbers(shape, getattr(torch, job.model.dtype), world, seed),
            "labels": labels,
        }
    source = whole_numbers((rows, job.task.input_length or length), config.vocab_size, world, seed + 1)
    return {"input_ids": source, "labels": labels}
