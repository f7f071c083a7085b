"""chunked-loss: projection to the vocabulary and cross-entropy in pieces of tokens, so that the full logits never
exist. Each piece's gradient is computed in the forward pass, where its logits are: no second projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from memfit.core.errors import BadInput
from memfit.core.step import Step, World
from memfit.core.strategy import Situation, Stage, Strategy


class ChunkedLoss(Strategy, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``tokens``: tokens per piece. Exact: the same sums in another order."""

    name: ClassVar[str] = "chunked-loss"
    stage: ClassVar[Stage] = "model"
    targets: ClassVar[tuple[str, ...]] = ("activations", "temporaries")
    needs: ClassVar[frozenset[str]] = frozenset({"vocabulary-head"})

    tokens: int = 1024

    @classmethod
    def worth_trying(cls, situation: Situation) -> Iterator[Strategy]:
        if "vocabulary-head" not in situation.capabilities:
            return
        total = situation.rows * situation.items_per_row
        for tokens in (1024, 256):
            if tokens < total:
                yield cls(tokens=tokens)

    def apply(self, step: Step, world: World) -> Step:
        head = step.head
        if head is None:
            raise BadInput("strategy.needs", setting="strategy.chunked-loss", missing="vocabulary-head")
        if self.tokens < 1:
            raise BadInput("input.positive", setting="strategy.chunked-loss.tokens", value=self.tokens)
        chunk = self.tokens

        def loss(model: Any, data: Any) -> Any:
            hidden, labels = head.hidden(model, data)
            if head.shift:  # the last position has no next token; its label is ignored, so no copy is made
                labels = _next_labels(labels)
            projection = model.get_submodule(head.module)
            return linear_cross_entropy(hidden.reshape(-1, hidden.shape[-1]), projection.weight,
                                        getattr(projection, "bias", None), labels.reshape(-1), chunk)  # fmt: skip

        return replace(step, loss=loss)


def _next_labels(labels: Any) -> Any:
    import torch

    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100)


def linear_cross_entropy(hidden: Any, weight: Any, bias: Any, labels: Any, chunk: int) -> Any:
    """Mean cross-entropy of ``hidden @ weight.T + bias`` over labels != -100.

    Args:
        hidden: (tokens, features). weight: (classes, features). bias: (classes,) or None. labels: (tokens,), int64.
        chunk: tokens whose logits exist at once.
    """
    import torch

    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return _function().apply(hidden, weight, bias, labels, chunk)


def _function() -> Any:
    """The autograd function, made on first use so that the shelf can be listed without torch."""
    global _made
    if _made is None:
        import torch

        class LinearCrossEntropy(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, labels: Any, chunk: int) -> Any:
                train_hidden, train_weight, train_bias = ctx.needs_input_grad[:3]
                grad_hidden = torch.empty_like(hidden) if train_hidden else None
                # Pieces are summed in float32: many bf16 additions would lose what each piece adds.
                grad_weight = torch.zeros_like(weight, dtype=torch.float32) if train_weight else None
                grad_bias = torch.zeros_like(bias, dtype=torch.float32) if train_bias else None
                total = torch.zeros((), dtype=torch.float32, device=hidden.device)
                count = (labels != -100).sum().clamp(min=1)
                for start in range(0, hidden.shape[0], chunk):
                    piece, own = hidden[start : start + chunk], labels[start : start + chunk]
                    logits = torch.nn.functional.linear(piece, weight, bias).float()
                    logits = torch.log_softmax(logits, dim=-1)
                    total += torch.nn.functional.nll_loss(logits, own, ignore_index=-100, reduction="sum")
                    if not (train_hidden or train_weight or train_bias):
                        continue
                    grad = logits.exp_()  # softmax in place: the logits' own memory becomes their gradient
                    valid = own != -100
                    grad.scatter_add_(
                        1, own.clamp(min=0).unsqueeze(1), grad.new_full((own.shape[0], 1), -1.0)
                    )
                    grad.mul_((valid / count).unsqueeze(1))
                    del logits
                    if grad_bias is not None:
                        grad_bias += grad.sum(0)
                    grad = grad.to(hidden.dtype)
                    if grad_hidden is not None:
                        torch.mm(grad, weight, out=grad_hidden[start : start + chunk])
                    if grad_weight is not None:
                        if grad_weight.dtype == grad.dtype:
                            grad_weight.addmm_(grad.t(), piece)
                        else:
                            grad_weight += torch.mm(grad.t(), piece)
                    del grad
                grads = (grad_hidden, _narrow(grad_weight, weight), _narrow(grad_bias, bias))
                ctx.save_for_backward(*grads)
                return total / count

            @staticmethod
            def backward(ctx: Any, upstream: Any) -> Any:
                # In place: nobody else holds these, and a scaled copy of a vocabulary-sized gradient is the peak.
                return *(None if g is None else g.mul_(upstream) for g in ctx.saved_tensors), None, None

        _made = LinearCrossEntropy
    return _made


def _narrow(grad: Any, like: Any) -> Any:
    return None if grad is None else grad.to(like.dtype)


_made: Any = None
