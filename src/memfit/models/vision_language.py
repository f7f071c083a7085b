"""Vision-language models of the GLM-4V and Qwen2-VL kind: images become a varying number of tokens in the
text.

An image of w × h pixels is resized to multiples of 28 (patch 14, merge 2), cut into 14 × 14 patches of two
equal frames, and each 2 × 2 patches become one token, between a start and an end token.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memfit.core.errors import BadInput
from memfit.core.job import Job
from memfit.core.step import Batch, World
from memfit.models.batches import IGNORED, check_sizes, cut_rows, is_fake, map_tensors, part_items
from memfit.models.tasks import Task, real_numbers

# The pixel limits of GLM-4.1V's processor, over both frames (transformers, image_processing_glm4v.py:
# ``size``).
_LEAST_PIXELS, _MOST_PIXELS = 112 * 112, 28 * 28 * 15000
# Fake tensors up to this many elements keep their values: grids and token ids, never activations (see
# ``_keep_values``).
_VALUES_UP_TO = 1 << 20


def grid_of(width: int, height: int, vision: Any) -> tuple[int, int, int]:
    """Frames, rows and columns of patches of one image (the processor's rule).

    Raises:
        BadInput: the image is more than 200 times as long as it is wide.
    """
    patch, frames = vision.patch_size, vision.temporal_patch_size
    step = patch * vision.spatial_merge_size
    if max(width, height) > 200 * min(width, height):
        raise BadInput("models.image_shape", setting="task.images", value=[width, height])
    if min(width, height) < step:
        scale = max(step / width, step / height)
        width, height = int(width * scale), int(height * scale)
    wide, high = round(width / step) * step, round(height / step) * step
    if frames * wide * high > _MOST_PIXELS:
        beta = math.sqrt(frames * width * height / _MOST_PIXELS)
        wide, high = (max(step, math.floor(v / beta / step) * step) for v in (width, height))
    elif frames * wide * high < _LEAST_PIXELS:
        beta = math.sqrt(_LEAST_PIXELS / (frames * width * height))
        wide, high = (math.ceil(v * beta / step) * step for v in (width, height))
    return 1, high // patch, wide // patch


def make_task(config: Any, job: Job, length: int) -> Task:
    """Rows of ``length`` tokens, of which ``task.images_per_row`` images of ``task.images`` take their share.

    Raises:
        BadInput: another kind of vision model, or the images do not fit into the row.
    """
    vision = getattr(config, "vision_config", None)
    needed = ("patch_size", "temporal_patch_size", "spatial_merge_size")
    if vision is None or not all(hasattr(vision, k) for k in needed):
        raise BadInput("models.other_vision", setting="model.name", value=config.model_type)
    own = getattr(vision, "image_size", 336)
    width, height = job.task.images or (own, own)
    grid = grid_of(width, height, vision)
    tokens = math.prod(grid) // vision.spatial_merge_size**2
    images = job.task.images_per_row
    taken = images * (tokens + 2)
    if taken >= length:
        raise BadInput("models.images_too_long", setting="task.sequence_length", value=length, tokens=taken)
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    patch_values = channels * vision.temporal_patch_size * vision.patch_size**2

    training = job.task.kind == "train"

    def make_batch(rows: int, world: World) -> Batch:
        if world.simulated:
            _keep_values()
        ids, kinds = _row(config, job, length, images, tokens)
        device = world.device
        pixels = (rows * images * math.prod(grid), patch_values)
        data = {
            "input_ids": torch.tensor([ids] * rows, device=device),
            "mm_token_type_ids": torch.tensor([kinds] * rows, device=device),
            "image_grid_thw": torch.tensor([list(grid)] * (rows * images), device=device),
            # In float32 whatever the model's dtype, as processors give it; the model casts its patches.
            "pixel_values": real_numbers(pixels, torch.float32, world, job.model.seed),
        }
        if not training:
            return Batch(data, rows, rows)
        labels = [IGNORED if k else i for i, k in zip(ids, kinds, strict=True)]
        data["labels"] = torch.tensor([labels] * rows, device=device)
        return Batch(data, rows, rows * sum(not k for k in kinds[1:]))

    def split(batch: Batch, sizes: list[int]) -> list[Batch]:
        return _split(batch, sizes, config.image_token_id, vision.spatial_merge_size)

    return Task(make_batch, split, _loss, shift=True)


def _row(config: Any, job: Job, length: int, images: int, tokens: int) -> tuple[list[int], list[int]]:
    """One row's ids and their kinds (1: an image's token)."""
    special = {v for k, v in vars(config).items() if k.endswith("_token_id")}
    text = next(i for i in range(config.get_text_config().vocab_size) if i not in special)
    start = _first(config, "image_start_token_id", "vision_start_token_id", text)
    end = _first(config, "image_end_token_id", "vision_end_token_id", text)
    ids: list[int] = []
    kinds: list[int] = []
    for _ in range(images):
        ids += [start, *[config.image_token_id] * tokens, end]
        kinds += [0, *[1] * tokens, 0]
    rest = length - len(ids)
    return ids + [text] * rest, kinds + [0] * rest


def _first(config: Any, name: str, other: str, default: int) -> int:
    """GLM and Qwen name the token differently; a config without either has ordinary text there."""
    found = getattr(config, name, None) or getattr(config, other, None)
    return default if found is None else int(found)


def _split(batch: Batch, sizes: list[int], image_token: int, merge: int) -> list[Batch]:
    """Cuts text along rows and images along the rows that they stand in."""
    check_sizes(batch, sizes)
    data = dict(batch.data)
    grid, pixels = data.pop("image_grid_thw", None), data.pop("pixel_values", None)
    per_row = _images_per_row(batch, grid, image_token, merge) if grid is not None else []
    patches = [math.prod(g) for g in grid.tolist()] if grid is not None else []
    parts, row, image, patch = [], 0, 0, 0
    for size in sizes:
        part = map_tensors(data, cut_rows(row, size, batch.rows))
        if grid is not None and pixels is not None:
            count = sum(per_row[row : row + size])
            taken = sum(patches[image : image + count])
            part["image_grid_thw"] = grid.narrow(0, image, count)
            part["pixel_values"] = pixels.narrow(0, patch, taken)
            image, patch = image + count, patch + taken
        parts.append(Batch(part, size, part_items(batch, part, size, shift=True)))
        row += size
    return parts


def _images_per_row(batch: Batch, grid: Any, image_token: int, merge: int) -> list[int]:
    if is_fake(batch.data["input_ids"]):
        return [len(grid) // batch.rows] * batch.rows
    wanted = (batch.data["input_ids"] == image_token).sum(dim=1).tolist()
    left = [math.prod(g) // merge**2 for g in grid.tolist()]
    counts = []
    for tokens in wanted:
        count = 0
        while tokens > 0 and left:
            tokens -= left.pop(0)
            count += 1
        counts.append(count)
    return counts


def _loss(model: Any, data: Any) -> Any:
    """The model's mean loss; for a batch without labels, the logits of the last position."""
    ids = data["input_ids"]
    if "labels" not in data:
        data = {**data, "logits_to_keep": 1}
    if is_fake(ids):
        # The positions depend on values step by step; on fakes the tensor that the model would compute is
        # given to it.
        data = {k: v for k, v in data.items() if k != "mm_token_type_ids"}
        data["position_ids"] = torch.zeros((3, *ids.shape), dtype=ids.dtype, device=ids.device)
        with _StaticScatter():
            out = model(**data)
    else:
        out = model(**data)
    return out.loss if "labels" in data else out.logits


def _keep_values() -> None:
    """Lets fake tensors made from lists keep their values, as torch does for single numbers
    (``torch.tensor(1)``), so that sizes which a vision model reads from its grids are known without data.

    The limit stays raised: checkpointing runs parts of the model again during backward.
    """
    from torch._subclasses import fake_tensor

    fake_tensor.CONSTANT_NUMEL_LIMIT = max(fake_tensor.CONSTANT_NUMEL_LIMIT, _VALUES_UP_TO)


class _Scatter(torch.autograd.Function):
    """``masked_scatter`` whose backward has static shapes: the same tensors are saved and made as in
    torch's own (derivatives.yaml: a masked_fill for self, a masked_select for source), but sizes come from
    the source."""

    @staticmethod
    def forward(ctx: Any, into: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.shape = source.shape
        return torch.Tensor.masked_scatter(into, mask, source)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
        (mask,) = ctx.saved_tensors
        (gradient,) = gradients
        into = gradient.masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        source = gradient.new_empty(ctx.shape) if ctx.needs_input_grad[2] else None
        return into, None, source


class _StaticScatter(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.masked_scatter and torch.is_grad_enabled():
            return _Scatter.apply(*args)
        return func(*args, **(kwargs or {}))
