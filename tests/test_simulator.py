"""The simulator and the planner on top of it: the short way equals the long way, answers are stable, errors
name the place."""

from __future__ import annotations

import functools
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from memfit.core.device import Device  # noqa: E402
from memfit.core.errors import BadInput, CannotSimulate  # noqa: E402
from memfit.core.job import Job, make_job  # noqa: E402
from memfit.core.profile import Profile  # noqa: E402
from memfit.core.strategy import Strategy  # noqa: E402
from memfit.core.units import MIB  # noqa: E402
from memfit.devices import cpu, get_device  # noqa: E402
from memfit.models import build_step  # noqa: E402
from memfit.plan.planner import make_plan, situation_of  # noqa: E402
from memfit.simulate.simulator import simulate  # noqa: E402
from memfit.strategies import read_strategy, shelf  # noqa: E402

SHELF = tuple(shelf())
DENSE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}  # fmt: skip
BERT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}
TEXT = {"sequence_length": 96, "global_batch": 4}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "glm": ("glm-4-9b", DENSE, TEXT),
    "moe": ("qwen3-30b-a3b",
            DENSE | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}, TEXT),
    "bert": ("bert-base-uncased", BERT | {"vocab_size": 512}, TEXT),
    "vit": ("vit-base", BERT | {"image_size": 64}, {"global_batch": 4, "labels": 5}),
}  # fmt: skip
on_all_models = pytest.mark.parametrize("model", MODELS)
on_both_targets = pytest.mark.parametrize("device", ["cpu", "h100"])


@functools.cache
def job_of(model: str) -> Job:
    name, overrides, task = MODELS[model]
    return make_job({"model": {"name": name, "overrides": overrides}, "task": task})


@functools.cache
def target(device: str) -> Device:
    return cpu.device(measure=False) if device == "cpu" else get_device(device)


def predict(model: str, strategies: tuple[Strategy, ...], device: str, full_depth: bool = False) -> Profile:
    return simulate(lambda w: build_step(job_of(model), w), strategies, target(device), full_depth=full_depth)


@functools.cache
def options_of(model: str, name: str, device: str) -> tuple[Strategy, ...]:
    """What is worth trying, then the defaults with each word of each option."""
    job, kind = job_of(model), shelf()[name]
    seen = list(kind.worth_trying(situation_of(job, target(device), lambda w: build_step(job, w))))
    if kind._has_defaults():
        for field, hint in typing.get_type_hints(kind).items():
            if typing.get_origin(hint) is typing.Literal:
                seen += [kind(**{field: value}) for value in typing.get_args(hint)]
    return tuple(dict.fromkeys(seen))


def assert_short_is_long(model: str, strategies: tuple[Strategy, ...], device: str) -> None:
    short = predict(model, strategies, device)
    long = predict(model, strategies, device, full_depth=True)
    assert short.peak_bytes == long.peak_bytes, strategies
    assert short.length == long.length, strategies
    assert short.breakdown() == long.breakdown(), strategies
    assert short.process_bytes == long.process_bytes, strategies
    assert short.step_seconds == pytest.approx(long.step_seconds, rel=1e-3), strategies


@on_both_targets
@on_all_models
def test_short_way_is_the_long_way(model: str, device: str) -> None:
    assert_short_is_long(model, (), device)


# Without strategies every model is asked on both targets (above), under each strategy on one.
@pytest.mark.parametrize(("model", "device"), [("glm", "cpu"), ("glm", "h100"), ("moe", "h100"), ("bert", "cpu"),
                                               ("vit", "cpu")])  # fmt: skip
@pytest.mark.parametrize("name", SHELF)
def test_short_way_is_the_long_way_under_a_strategy(name: str, model: str, device: str) -> None:
    options = options_of(model, name, device)
    if not options:
        pytest.skip(f"{name} has nothing for {model}")
    try:
        assert_short_is_long(model, (options[len(options) // 2],), device)
    except BadInput as error:
        pytest.skip(str(error))


@pytest.mark.slow
@on_both_targets
@on_all_models
@pytest.mark.parametrize("name", SHELF)
def test_short_way_is_the_long_way_under_every_option(name: str, model: str, device: str) -> None:
    for strategy in options_of(model, name, device):
        try:
            assert_short_is_long(model, (strategy,), device)
        except BadInput:
            continue  # this model cannot be served


def test_estimate_is_deterministic() -> None:
    for device in ("cpu", "h100"):
        assert predict("moe", (), device) == predict("moe", (), device)


FACTORY = """
import torch

class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.first(x)
        {line}
        return y

def factory():
    return Broken(), torch.zeros(4, 8), lambda model, batch: model(batch).mean()
"""


@pytest.mark.parametrize(
    "line",
    ["raise ValueError('the model is unwell')", "y = y @ torch.ones(9, 9)", "y = y[torch.tensor(['x'])]"],
)
def test_a_step_that_raises_names_the_users_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FACTORY.format(line=line), encoding="utf-8")
    job = make_job({"model": {"name": f"{file}:factory"}, "task": {"global_batch": 4}})
    number = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if line in text)
    with pytest.raises(CannotSimulate) as caught:
        simulate(lambda w: build_step(job, w), (), target("cpu"))
    assert f"mine.py:{number}" in str(caught.value)
    assert line in str(caught.value)


def plan(model: str, device: str, budget: int, **changes: Any) -> Any:
    job = msgspec.structs.replace(job_of(model), **changes)
    return make_plan(job, target(device), lambda w: build_step(job, w), budget)


@on_both_targets
def test_a_tiny_budget_has_no_plan_and_says_what_it_needs(device: str) -> None:
    made = plan("glm", device, 8 * MIB)
    assert not made.fits
    assert made.needs
    assert made.profile.process_bytes <= made.baseline.process_bytes
    shown = made.to_json()
    assert shown["fits"] is False
    assert shown["nearest"]["needs"]


@on_both_targets
def test_a_plan_simulates_again_to_the_same_profile(device: str) -> None:
    baseline = predict("glm", (), device)
    fixed = target(device).context_bytes
    margin = job_of("glm").budget.margin
    budget = int((fixed + (baseline.process_bytes - fixed) * 0.7) / (1 - margin))
    made = plan("glm", device, budget)
    if device == "cpu":
        assert made.fits
        assert made.choices, "a budget below the baseline needs a strategy"
    again = predict("glm", tuple(read_strategy(e) for e in made.strategies), device)
    assert again == made.profile


def test_a_large_budget_needs_nothing_that_costs_time() -> None:
    made = plan("glm", "cpu", 64 << 30)
    assert made.fits
    assert made.profile.step_seconds <= made.baseline.step_seconds * 1.01
