"""What can be read off a model: its repeated blocks, its vocabulary head, its capabilities."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from memfit.core.step import Head
from memfit.models.batches import labels_of

# Config keys by which a model changes its logits after the projection (Gemma 2, Cohere, Granite, …): the
# loss is then not that of the bare projection, and a chunked loss would differ.
_LOGIT_CHANGES = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "logits_scale": 1.0,
    "lm_head_multiplier": 1.0,
    "mup_scale": 1.0,
    "output_multiplier_scale": 1.0,
}


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Paths of the repeated blocks, in the order of registration (which is the order of execution in every
    model of the catalogue): the children of the outermost lists that hold at least two alike.

    Alike means: of one class and with the same shapes of parameters, so that ResNet's stages (all different)
    give way to the layers inside them, in each stage. Where nothing is alike, one class is enough. Modules
    without parts of their own (one ``Linear``) are no blocks.
    """
    exact = {
        _pattern(path) for path, children in _lists(model) if _has_twins(map(_shapes, children.values()))
    }

    def chosen(path: str, children: dict[str, nn.Module]) -> bool:
        return _pattern(path) in exact if exact else _has_twins((type(c),) for c in children.values())

    outer: list[str] = []
    blocks: list[str] = []
    for path, children in _lists(model):
        if chosen(path, children) and not any(path.startswith(o) for o in outer):
            outer.append(f"{path}." if path else "")
            blocks += [outer[-1] + name for name in children]
    return tuple(blocks)


def _lists(model: nn.Module) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """Each list of modules, an outer one before those inside it, and its children that have parts."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = {n: c for n, c in module.named_children() if next(c.children(), None) is not None}
            if children:
                yield path, children


def _pattern(path: str) -> str:
    return re.sub(r"\b\d+\b", "*", path)


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return (type(module), *(p.shape for p in module.parameters()))


def _has_twins(signatures: Iterable[tuple[Any, ...]]) -> bool:
    found = list(signatures)
    return len(set(found)) < len(found)


def find_head(model: Any, shift: bool) -> Head | None:
    """The vocabulary head of a Hugging Face language model, or None where its loss is not a plain cross
    entropy of the projection's output."""
    config = model.config.get_text_config()
    for key, neutral in _LOGIT_CHANGES.items():
        if getattr(config, key, None) not in (None, neutral):
            return None
    projection = model.get_output_embeddings()
    if not isinstance(projection, nn.Linear) or not _has_plain_logits(type(model)):
        return None
    path = next((n for n, m in model.named_modules() if m is projection), None)
    if path is None:
        return None

    def hidden(model: Any, data: Any) -> tuple[Any, Any]:
        rest = {k: v for k, v in data.items() if k != "labels"}
        with _passing_through(_submodule(model, path)):
            return model(**rest).logits, labels_of(data)

    return Head(module=path, classes=projection.out_features, shift=shift, hidden=hidden)


def _has_plain_logits(kind: type[nn.Module]) -> bool:
    """Whether the class's forward leaves the projection's output as it is (read from its source)."""
    try:
        source = inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False
    code = re.sub(r'r?"""(?s:.*?)"""', "", source)
    return re.search(r"softcap|tanh|\blogits = logits|\blogits [*/]|lm_head\([^\n]*\) *[*/]", code) is None


def _submodule(model: nn.Module, path: str) -> nn.Module:
    """The module at ``path``, also where a wrapper (PEFT, DDP) has put names in front of it."""
    for name, module in model.named_modules():
        if name == path or name.endswith(f".{path}"):
            return module
    raise AssertionError(f"no module {path} in {type(model).__name__}")


@contextmanager
def _passing_through(projection: nn.Module) -> Iterator[None]:
    """While open, the projection returns its input, so that the *whole* model can be called (hooks of FSDP,
    PEFT and recorders run as usual) and gives its last hidden state where its logits would be."""
    before = projection.__dict__.get("forward")
    projection.__dict__["forward"] = lambda hidden: hidden
    try:
        yield
    finally:
        if before is None:
            del projection.__dict__["forward"]
        else:
            projection.__dict__["forward"] = before


def find_capabilities(model: nn.Module, blocks: tuple[str, ...], head: Head | None) -> frozenset[str]:
    """The capabilities that a model has by itself (see ``Step.capabilities``)."""
    found = {"batch-statistics" if _uses_batch_statistics(model) else "batch-separable"}
    if blocks:
        found.add("blocks")
    if head is not None:
        found.add("vocabulary-head")
    if _has_dropout(model):
        found.add("dropout")
    if any(not p.requires_grad for p in model.parameters()):
        found.add("frozen-parameters")
    return frozenset(found)


def _uses_batch_statistics(model: nn.Module) -> bool:
    if any(isinstance(m, _BatchNorm) and (m.training or not m.track_running_stats) for m in model.modules()):
        return True
    # A mixture of experts that balances its router does so over all tokens of a batch.
    return bool(getattr(getattr(model, "config", None), "output_router_logits", False))


def _has_dropout(model: nn.Module) -> bool:
    for module in model.modules():
        if not module.training:
            continue
        if isinstance(module, _DropoutNd) and module.p > 0:
            return True
        # Functional dropout: models keep its probability as a number on the module.
        if any(
            "drop" in key and isinstance(value, float) and value > 0 for key, value in vars(module).items()
        ):
            return True
    return False
