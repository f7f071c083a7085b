"""The laws of the shelf: each strategy that exists is tested the moment its file does, on small models."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from memfit.core.errors import BadInput  # noqa: E402
from memfit.core.job import Job, make_job, read_job, write_job  # noqa: E402
from memfit.core.profile import Profile  # noqa: E402
from memfit.core.step import Batch, Step  # noqa: E402
from memfit.core.strategy import Strategy  # noqa: E402
from memfit.core.words import LANGUAGES, catalogue  # noqa: E402
from memfit.devices import cpu  # noqa: E402
from memfit.engines.in_process import Prepared, prepare  # noqa: E402
from memfit.models import build_step  # noqa: E402
from memfit.plan.planner import situation_of  # noqa: E402
from memfit.run.measure import measure_step  # noqa: E402
from memfit.run.world import RealWorld  # noqa: E402
from memfit.simulate.simulator import simulate  # noqa: E402
from memfit.strategies import apply_all, read_strategy, shelf  # noqa: E402

SQUARE = 0.01
SHELF = tuple(shelf())
DENSE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}  # fmt: skip
BERT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT = {"sequence_length": 96, "global_batch": 4}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "glm": ("glm-4-9b", DENSE, TEXT),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 512}, TEXT),
    "bert": ("bert-base-uncased", BERT | {"vocab_size": 512}, TEXT),
    "vit": ("vit-base", BERT | {"image_size": 64}, {"global_batch": 4, "labels": 5}),
    "moe": ("qwen3-30b-a3b",
            DENSE | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}, TEXT),
}  # fmt: skip
NO_DROPOUT: dict[str, dict[str, float]] = {
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, and lose much where others use the machine too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


on_all_models = pytest.mark.parametrize("model", MODELS)
on_the_shelf = pytest.mark.parametrize("name", SHELF)


@functools.cache
def job_of(model: str, dropout: bool = True) -> Job:
    name, overrides, task = MODELS[model]
    changes = {} if dropout else NO_DROPOUT.get(model, {})
    return make_job({"model": {"name": name, "overrides": overrides | changes}, "task": task})


@functools.cache
def target() -> Any:
    return cpu.device(measure=False)


@functools.cache
def options_of(model: str, name: str) -> tuple[Strategy, ...]:
    """The settings of a strategy that can be applied to a model: what it finds worth trying, and its defaults
    with each choice of each option that is a choice among words."""
    job, kind = job_of(model), shelf()[name]
    seen = list(kind.worth_trying(situation_of(job, target(), lambda w: build_step(job, w))))
    if kind._has_defaults():
        seen.append(kind())
        for field, hint in typing.get_type_hints(kind).items():
            if typing.get_origin(hint) is typing.Literal:
                seen += [kind(**{field: value}) for value in typing.get_args(hint)]
    return tuple(s for s in dict.fromkeys(seen) if applies(model, [s]))


def applies(model: str, strategies: list[Strategy]) -> bool:
    """Whether a combination serves a model; one that does not says so when it is applied."""
    try:
        prepared(model, strategies)
    except BadInput:
        return False
    return True


def few(options: tuple[Strategy, ...]) -> list[Strategy]:
    """First, middle and last; all that differ in a word."""
    picked = {0, len(options) // 2, len(options) - 1} if options else set()
    words = [tuple(v for v in msgspec.to_builtins(s).values() if isinstance(v, str)) for s in options]
    picked |= {words.index(w) for w in words}
    return [options[i] for i in sorted(picked)]


def key(strategies: list[Strategy]) -> str:
    return json.dumps([s.entry() for s in strategies])


def prepared(
    model: str, strategies: list[Strategy], dropout: bool = True
) -> tuple[Step, Prepared, RealWorld]:
    world = RealWorld(target())
    step = apply_all(strategies, build_step(job_of(model, dropout), world), world)
    return step, prepare(step, world), world


@functools.cache
def _predicted(model: str, entries: str) -> Profile:
    strategies = [read_strategy(e) for e in json.loads(entries)]
    return simulate(lambda w: build_step(job_of(model), w), strategies, target())


@functools.cache
def _measured(model: str, entries: str) -> Profile:
    gc.collect()
    torch.manual_seed(0)
    step, ready, world = prepared(model, [read_strategy(e) for e in json.loads(entries)])
    window = step.make_batch(step.global_batch, world)
    ready.run(window)  # makes the optimizer's state
    return measure_step(ready, window, world)[1]


def both(model: str, strategies: list[Strategy]) -> tuple[Profile, Profile]:
    """The predicted and the measured profile of a combination."""
    return _predicted(model, key(strategies)), _measured(model, key(strategies))


def misses(model: str, combinations: list[list[Strategy]]) -> list[str]:
    """What is further than the tolerance from its prediction."""
    lines = []
    for strategies in combinations:
        predicted, measured = both(model, strategies)
        error = (predicted.peak_bytes - measured.peak_bytes) / measured.peak_bytes
        if abs(error) > SQUARE:
            lines.append(f"{error:+.2%} {key(strategies)}: predicted {predicted.peak_bytes} at {predicted.peak_at.op}, "
                         f"measured {measured.peak_bytes} at {measured.peak_at.op}")  # fmt: skip
    return lines


# Square


@on_all_models
def test_square_without_strategies(model: str) -> None:
    assert not misses(model, [[]])


@on_all_models
@on_the_shelf
def test_square(name: str, model: str) -> None:
    options = options_of(model, name)
    if not options:
        pytest.skip(f"{name} has nothing for {model}")
    # One model is asked for all that differ, the others for the strongest; the rest is slow.
    assert not misses(model, [[s] for s in (few(options) if model == "glm" else [strongest(name, model)])])


@pytest.mark.slow
@on_all_models
@on_the_shelf
def test_square_of_every_option(name: str, model: str) -> None:
    assert not misses(model, [[s] for s in options_of(model, name)])


# Fidelity


def gradients(
    model: str, strategies: list[Strategy], window: Batch | None = None, micro_batch: int | None = None
) -> tuple[float, list[Any], Any]:
    """Loss, gradients of all parameters that train, and the window of a step that stops before its update."""
    torch.manual_seed(0)
    step, ready, world = prepared(model, strategies, dropout=False)
    window = window or step.make_batch(step.global_batch, world)
    ready.update = lambda: None  # type: ignore[method-assign]
    loss = float(ready.run(window, micro_batch))
    if ready.scaler is not None:
        ready.scaler.unscale_(ready.optimizer)
    return loss, [p.grad for p in step.model.parameters() if p.requires_grad], window


@functools.cache
def unmodified(model: str) -> tuple[float, list[Any], Any]:
    return gradients(model, [])


def assert_same(
    found: tuple[float, list[Any], Any], wanted: tuple[float, list[Any], Any], what: str = ""
) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-4, abs=1e-5), what
    assert len(found[1]) == len(wanted[1]), what
    for number, (grad, expected) in enumerate(zip(found[1], wanted[1], strict=True)):
        torch.testing.assert_close(
            grad, expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=number: f"{what} {n}: {m}"
        )


@on_all_models
@on_the_shelf
def test_fidelity(name: str, model: str) -> None:
    options = options_of(model, name)
    if not options:
        pytest.skip(f"{name} has nothing for {model}")
    reference = unmodified(model)
    for strategy in few(options):
        found = gradients(model, [strategy])
        assert all(g is not None for g in found[1]), f"{strategy}: a parameter that trains gets no gradient"
        if strategy.fidelity == "exact":
            assert_same(found, reference, str(strategy))
        else:
            assert strategy.bound > 0, f"{strategy} is lossy and states no bound"
            assert abs(found[0] - reference[0]) <= strategy.bound * abs(reference[0]), strategy
            assert all(torch.isfinite(g).all() for g in found[1]), strategy


# Saving is seen


def most(profile: Profile, kinds: tuple[str, ...]) -> dict[str, int]:
    """The most bytes of some kinds on the device, by name of phase."""
    changes: dict[int, int] = {}
    for a in profile.allocations:
        if a.place == "device" and a.kind in kinds:
            changes[a.born] = changes.get(a.born, 0) + a.size
            changes[a.died] = changes.get(a.died, 0) - a.size
    found: dict[str, int] = {}
    level, moments = 0, sorted(changes)
    at = 0
    for phase in profile.phases:
        top = level
        while at < len(moments) and moments[at] < phase.stop:
            level += changes[moments[at]]
            top = max(top, level)
            at += 1
        found[phase.name] = max(found.get(phase.name, 0), top)
    return found


@on_the_shelf
def test_saving_is_seen(name: str) -> None:
    kinds = shelf()[name].targets
    seen = []
    for model in MODELS:
        plain = both(model, [])
        options = options_of(model, name)
        for strategy in [strongest(name, model)] if options and model != "glm" else few(options):
            applied = both(model, [strategy])
            if all(a.peak_bytes < p.peak_bytes for a, p in zip(applied, plain, strict=True)):
                return
            before, after = [most(p, kinds) for p in plain], [most(a, kinds) for a in applied]
            if any(
                after[0].get(ph, 0) < before[0][ph] and after[1].get(ph, 0) < before[1][ph]
                for ph in before[0]
            ):
                return
            seen.append((model, strategy.entry(), before, after))
    pytest.fail(f"neither the peak nor {kinds} fall anywhere: {seen}")


# Combination


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(SHELF, 2)))
def test_combination(one: str, other: str) -> None:
    first, second = shelf()[one], shelf()[other]
    if first.excludes & second.gives or second.excludes & first.gives:
        pytest.skip("they exclude each other")
    if not options_of("glm", one) or not options_of("glm", other):
        pytest.skip("nothing for this model")
    # The strongest that each finds worth trying: what the planner ends with where memory is short.
    pair = [strongest(one), strongest(other)]
    assert not misses("glm", [pair])


@pytest.mark.parametrize("model", ["glm", "bert"])
def test_all_together(model: str) -> None:
    taken: list[Strategy] = []
    for name in SHELF:
        if options_of(model, name) and applies(model, [*taken, strongest(name, model)]):
            taken.append(strongest(name, model))
    assert len(taken) >= 3
    assert not misses(model, [taken])


def strongest(name: str, model: str = "glm") -> Strategy:
    job = job_of(model)
    tried = list(shelf()[name].worth_trying(situation_of(job, target(), lambda w: build_step(job, w))))
    return tried[-1] if tried else options_of(model, name)[0]


def test_combination_keeps_fidelity() -> None:
    exact = [s for s in (strongest(n) for n in SHELF if options_of("glm", n)) if s.fidelity == "exact"]
    taken: list[Strategy] = []
    for strategy in exact:
        if applies("glm", [*taken, strategy]):
            taken.append(strategy)
    assert_same(gradients("glm", taken), unmodified("glm"), key(taken))


# Options, words


@on_the_shelf
def test_options_round_trip(name: str, tmp_path: Path) -> None:
    options = {s for model in MODELS for s in options_of(model, name)}
    assert options
    for strategy in options:
        job = msgspec.structs.replace(job_of("glm"), strategy=(strategy.entry(),))
        file = tmp_path / "job.toml"
        file.write_text(write_job(job), encoding="utf-8")
        again = read_job(file)
        assert again == job
        assert read_strategy(again.strategy[0]) == strategy


@on_the_shelf
def test_has_a_title_and_a_docstring(name: str) -> None:
    kind = shelf()[name]
    assert kind.__doc__
    assert kind.__module__.rpartition(".")[2] == name.replace("-", "_")
    for language in LANGUAGES:
        assert catalogue(language).get(f"{name.replace('-', '_')}.title"), language


# Uneven windows


@functools.cache
def uneven(model: str) -> Batch:
    """Rows with very different numbers of labels, one with none."""
    _, _, window = unmodified(model)
    data = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in window.data.items()}
    data["labels"] = data["input_ids"].clone()
    data["labels"][0, 10:] = -100
    data["labels"][1, 70:] = -100
    data["labels"][3, :] = -100
    return dataclasses.replace(window, data=data)


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize("model", ["glm", "gpt2", "bert"])
def test_uneven_labels_and_last_micro_batch(model: str, micro_batch: int) -> None:
    window = uneven(model)
    assert_same(gradients(model, [], window, micro_batch), gradients(model, [], window))


@pytest.mark.parametrize("model", ["vit"])
def test_uneven_last_micro_batch_of_images(model: str) -> None:
    assert_same(gradients(model, [], unmodified(model)[2], 3), unmodified(model))


@on_the_shelf
def test_uneven_windows_under_each_strategy(name: str) -> None:
    for strategy in few(options_of("glm", name)):
        if strategy.fidelity == "exact":
            window = uneven("glm")
            assert_same(gradients("glm", [strategy], window, 3), gradients("glm", [], window), str(strategy))
