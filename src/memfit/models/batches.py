"""Batches as nests of tensors: cutting them along rows and counting what a loss is a mean over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from memfit.core.errors import BadInput
from memfit.core.step import Batch

IGNORED = -100  # the label that torch's cross entropy leaves out


def tensors(data: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a nest of dicts, lists and tuples, in order."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, dict):
        for value in data.values():
            yield from tensors(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from tensors(value)


def map_tensors(data: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nest with each tensor changed; anything that is no tensor stays as it is."""
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, dict):
        # A BatchEncoding (tokenizers) is a dict by behaviour; models take its plain contents alike.
        return {k: map_tensors(v, change) for k, v in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(v, change) for v in data))
    if isinstance(data, list | tuple):
        return type(data)(map_tensors(v, change) for v in data)
    return data


def count_rows(data: Any, setting: str = "batch") -> int:
    """Rows of a user's batch: dim 0 of its first tensor that has dimensions.

    Raises:
        BadInput: there is no such tensor.
    """
    for tensor in tensors(data):
        if tensor.dim() > 0:
            return int(tensor.shape[0])
    raise BadInput("models.batch_without_tensors", setting=setting, value=type(data).__name__)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape but no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor.is_meta or isinstance(tensor, FakeTensor)


def labels_of(data: Any) -> torch.Tensor | None:
    """The tensor under the key ``labels``, if the batch is a dict that has one."""
    found = data.get("labels") if isinstance(data, dict) else None
    return found if isinstance(found, torch.Tensor) else None


def count_items(data: Any, rows: int, *, shift: bool = False) -> int:
    """What a mean loss divides by: labels that are not -100 (after the shift, for the next token's), else
    rows.

    Labels count only where they are whole numbers with one per position, (rows, length).
    """
    labels = labels_of(data)
    if labels is None or labels.dim() < 2 or labels.is_floating_point():
        return rows
    if shift:
        labels = labels[:, 1:]
    if is_fake(labels):
        return int(labels.numel())
    return int((labels != IGNORED).sum())


def split_rows(batch: Batch, sizes: list[int], *, shift: bool = False) -> list[Batch]:
    """Cuts every tensor whose dim 0 is the batch's rows; others go into each part whole. Parts are views.

    On real tensors each part's items are counted; on fake ones they are in proportion to rows.

    Raises:
        BadInput: the sizes do not add up to the batch's rows.
    """
    check_sizes(batch, sizes)
    parts = []
    start = 0
    for size in sizes:
        data = map_tensors(batch.data, cut_rows(start, size, batch.rows))
        parts.append(Batch(data, size, part_items(batch, data, size, shift)))
        start += size
    return parts


def check_sizes(batch: Batch, sizes: list[int]) -> None:
    """Raises BadInput unless the sizes are positive and add up to the batch's rows."""
    if sum(sizes) != batch.rows or any(s < 1 for s in sizes):
        raise BadInput("models.split", setting="task.micro_batch", value=sizes, rows=batch.rows)


def part_items(batch: Batch, data: Any, size: int, shift: bool) -> int:
    """Items of a part of ``size`` rows: counted on real labels, in proportion on fake ones."""
    labels = labels_of(data)
    if labels is not None and is_fake(labels):
        return batch.items * size // batch.rows
    return count_items(data, size, shift=shift)


def cut_rows(start: int, size: int, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that takes ``size`` rows from ``start`` of a tensor whose dim 0 is the batch's rows (a
    view)."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(0, start, size) if tensor.dim() > 0 and tensor.shape[0] == rows else tensor

    return cut
