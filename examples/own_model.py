"""A network of your own: a small convolutional net that reads handwritten digits (scikit-learn's, 8 × 8
pixels).

    python examples/own_model.py        plan, apply and train from Python

A job file reaches the same model with ``[model] name = "examples/own_model.py:factory"``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit

CLASSES = 10
ROWS = 64
EPOCHS = 4


class Block(nn.Module):
    """A residual block; the input's shape (N, channels, height, width) is kept.

    GroupNorm, not BatchNorm: batch statistics depend on which rows are in a micro-batch together, so
    splitting a batch to save memory would train another network. GroupNorm looks at each row alone, and any
    split gives the same gradients.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(functional.gelu(self.first(functional.gelu(self.norm(x)))))


class DigitNet(nn.Module):
    """Images (N, 1, 8, 8) to scores (N, 10)."""

    def __init__(self, channels: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Block(channels) for _ in range(depth))
        self.norm = nn.GroupNorm(8, channels)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean((2, 3)))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean cross-entropy of a batch."""
    return functional.cross_entropy(model(batch["images"]), batch["labels"])


def factory() -> tuple[nn.Module, dict[str, Tensor], Any]:
    """What memfit needs to know of a model: the model, an example batch and the loss.

    The batch's first dimension is the one that memfit may split.
    """
    batch = {"images": torch.zeros(ROWS, 1, 8, 8), "labels": torch.zeros(ROWS, dtype=torch.long)}
    return DigitNet(), batch, loss


def digits(rows: int, epochs: int) -> Iterator[dict[str, Tensor]]:
    """Batches of scikit-learn's 1797 digits in a new order each epoch; a rest smaller than ``rows`` is left
    out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    classes = torch.tensor(labels, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for chosen in torch.randperm(len(pixels), generator=generator).split(rows)[: len(pixels) // rows]:
            yield {"images": pixels[chosen], "labels": classes[chosen]}


def main() -> None:
    torch.manual_seed(0)
    model, batch, loss_fn = factory()
    plan = memfit.plan(model=factory, batch=batch, loss=loss_fn, optimizer="adamw", budget="512MiB")
    prepared = plan.apply(model)
    for number, rows in enumerate(digits(ROWS, EPOCHS)):
        value = float(prepared.step(rows))
        if number % 20 == 0:
            print(f"step {number:3}  loss {value:.3f}")
    print(prepared.verdict())


if __name__ == "__main__":
    main()
