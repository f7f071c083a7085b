"""The Python face: what ``import memfit`` offers, and a plan applied to a real model in a plain loop."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit.api import load_job
from memfit.core.errors import BadInput, DoesNotFit

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_model.py"


@pytest.fixture
def example() -> Any:
    spec = importlib.util.spec_from_file_location("own_model", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_public_names() -> None:
    assert set(memfit.__all__) == {
        "BadInput", "DoesNotFit", "Job", "MemfitError", "Plan", "Profile", "Verdict", "__version__", "estimate", "fit",
        "plan",
    }  # fmt: skip
    for name in memfit.__all__:
        assert getattr(memfit, name) is not None
    importlib.import_module("memfit.plan.planner")  # importing the room must not hide the call
    assert callable(memfit.plan)


def test_plan_applied_to_a_real_model(example: Any) -> None:
    torch.manual_seed(0)
    model, batch, loss = example.factory()
    plan = memfit.plan(model=example.factory, batch=batch, loss=loss, budget="2GiB", device="cpu")
    live = plan.apply(model)
    losses = [float(live.step(rows)) for rows in example.digits(example.ROWS, 1)][:12]
    assert losses[-1] < losses[0]
    verdict = live.verdict()
    assert verdict is not None
    assert abs(verdict.peak_error) <= 0.01


def test_a_budget_that_nothing_meets_is_said_before_the_model_changes(example: Any) -> None:
    model, batch, loss = example.factory()
    plan = memfit.plan(model=example.factory, batch=batch, loss=loss, budget="8MiB", device="cpu")
    assert not plan.fits and plan.plan.needs
    with pytest.raises(DoesNotFit):
        plan.apply(model)


def test_job_options_are_checked() -> None:
    with pytest.raises(BadInput, match="nothing"):
        load_job({"model": {"name": "gpt2"}}, allow=["nothing"])
    with pytest.raises(BadInput, match="infer"):
        load_job({"model": {"name": "gpt2"}, "task": {"kind": "infer"}})
