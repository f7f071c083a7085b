"""The runner: real memory, a hard limit, recovery, exact resume, and everything that can go wrong on the
way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memfit.core.errors import BadInput, DoesNotFit, Interrupted, RunFailed
from memfit.core.job import Job, make_job
from memfit.core.plan import Choice, Plan
from memfit.core.profile import PeakAt, Profile
from memfit.run.folder import RunFolder, RunResult
from memfit.run.launch import run_planned
from memfit.run.measure import measure_in_child
from memfit.run.memory import child_environment

MIB = 2**20

FACTORY = """
import os, time
import torch
from torch import nn

ROWS, WIDTH = 16, {width}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(32, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout({dropout})) for _ in range(4))
        self.out = nn.Linear(WIDTH, 8)
        self.calls = 0

    def forward(self, x):
        x = self.embed(x).repeat_interleave({repeat}, 0)
        for block in self.blocks:
            x = block(x)
        return self.out(x)

def loss(model, batch):
    model.calls += 1
    {trick}
    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"].repeat_interleave({repeat}))

def factory():
    generator = torch.Generator(device="cpu").manual_seed(1)
    with torch.device("cpu"):
        x = torch.randn(ROWS, 32, generator=generator)
        y = torch.randint(8, (ROWS,), generator=generator)
    return Net(), {{"x": x, "labels": y}}, loss
"""

FORGED = 'raise RuntimeError("[enforce fail] DefaultCPUAllocator: can\'t allocate memory")'


def make_factory(
    folder: Path, *, width: int = 64, repeat: int = 1, dropout: float = 0.0, trick: str = "pass"
) -> str:
    file = folder / f"net_{abs(hash((width, repeat, dropout, trick)))}.py"
    file.write_text(textwrap.dedent(FACTORY).format(width=width, repeat=repeat, dropout=dropout, trick=trick))
    return f"{file}:factory"


def job_of(factory: str, *, steps: int = 6, run: dict[str, Any] | None = None, **task: Any) -> Job:
    return make_job({
        "model": {"name": factory},
        "task": {"global_batch": 16, "steps": steps, "learning_rate": 0.01, "warmup_steps": 3, **task},
        "budget": {"device": "cpu"},
        "run": {"save_every": 2, "threads": 1, **(run or {})},
    })  # fmt: skip


def plan_of(job: Job, *entries: dict[str, Any], budget: int = 2 * 2**30, fits: bool = True) -> Plan:
    """A plan without a search: the runner does not care where it came from."""
    empty = Profile(origin="predicted", allocations=(), length=0, phases=(), peak_bytes=MIB, peak_index=0,
                    peak_at=PeakAt(phase="backward", module="", op=""), reserved_bytes=MIB, process_bytes=MIB,
                    step_seconds=0.1)  # fmt: skip
    choices = tuple(
        Choice(name=e["name"], options={k: v for k, v in e.items() if k != "name"}, fidelity="exact",
               saves_bytes=0, costs_seconds=0.0, why="test")
        for e in entries
    )  # fmt: skip
    return Plan(
        job=job, device="cpu", budget_bytes=budget, fits=fits, choices=choices, rejected=(), questions=(),
        frontier=(), profile=empty, baseline=empty,
    )  # fmt: skip


def run_here(job: Job, folder: Path, *entries: dict[str, Any]) -> RunResult:
    """A run in this process: the same loop, without a child, malloc's settings and the hard limit."""
    from memfit.run.train import train

    job = msgspec.structs.replace(job, run=msgspec.structs.replace(job.run, hard_limit=False))
    plan, run = plan_of(job, *entries), RunFolder(folder)
    with run.locked():
        run.check(job)
        run.begin(job, plan)
        return train(job, plan, folder)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def in_fresh_process(program: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program), *arguments], capture_output=True,
                          text=True, env=child_environment(1), **options)  # fmt: skip


# -- memory --------------------------------------------------------------------------------------------------


def test_hard_limit_refuses_and_lifts_again() -> None:
    done = in_fresh_process(
        """
        import torch
        from memfit.run.memory import (anonymous_bytes, drop_frames, hard_limit, is_out_of_memory,
                                       peak_anonymous_bytes, reset_peak)
        torch.ones(1)
        held = anonymous_bytes()
        def fill():
            return [torch.ones(8 << 20) for _ in range(8)]  # 256 MiB in pieces of 32
        with hard_limit(held + (100 << 20)):
            try:
                fill()
            except Exception as error:
                assert is_out_of_memory(error), error
                drop_frames(error)
            else:
                raise SystemExit("not refused")
            assert not is_out_of_memory(ValueError("bad_alloc"))
            pieces = [torch.ones(8 << 20) for _ in range(2)]
            del pieces
        fill()
        assert reset_peak()
        low = peak_anonymous_bytes()
        fill()
        print((peak_anonymous_bytes() - low) / 2**20)
        """
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(256, rel=0.02)


def test_hard_limit_below_what_is_held() -> None:
    from memfit.run.memory import hard_limit

    with pytest.raises(RunFailed, match="before the model is built"), hard_limit(MIB):
        pass


# -- measuring -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, dict[str, Any], dict[str, Any]]:
    """A job whose activations rule, measured plainly and in pieces of 5 rows."""
    job = job_of(make_factory(tmp_path_factory.mktemp("wide"), width=256, repeat=512), steps=3)
    return job, measure_in_child(job, []), measure_in_child(job, PIECES, steps=4, budget=2**30)


PIECES = [{"name": "micro-batch", "size": 5}]


def test_measured_equals_simulated(wide: Any) -> None:
    from memfit.models import build_step
    from memfit.run.process import target_device
    from memfit.simulate.simulator import simulate
    from memfit.strategies import read_strategy

    job, plain, small = wide
    assert plain["outcome"] == small["outcome"] == "ran"
    for measured, entries in ((plain, []), (small, PIECES)):
        strategies = [read_strategy(e) for e in entries]
        predicted = simulate(lambda world: build_step(job, world), strategies, target_device("cpu"))
        assert predicted.peak_bytes == pytest.approx(measured["peak_bytes"], rel=0.01)
        grown = measured["process_bytes"] - measured["start_bytes"]
        assert predicted.reserved_bytes == pytest.approx(grown, rel=0.1)
        assert sum(measured["breakdown"].values()) == measured["peak_bytes"]
    assert small["peak_bytes"] < 0.6 * plain["peak_bytes"]
    assert small["within_budget"] and small["step_seconds"] > 0 and len(small["losses"]) == 4
    assert small["losses"][:3] == pytest.approx(plain["losses"], rel=1e-4)


def between(plain: dict[str, Any], small: dict[str, Any]) -> int:
    return (plain["process_bytes"] + small["process_bytes"]) // 2


def test_the_limit_is_real(wide: Any) -> None:
    job, plain, small = wide
    refused = measure_in_child(job, [], hard_limit_bytes=between(plain, small))
    assert refused["outcome"] == "out-of-memory" and refused["where"] in ("forward", "backward")
    assert measure_in_child(job, PIECES, hard_limit_bytes=between(plain, small))["outcome"] == "ran"


def test_a_failing_measurement_says_why(tmp_path: Path) -> None:
    job = job_of(make_factory(tmp_path, trick="raise ValueError('no such thing')"))
    assert measure_in_child(job, [])["outcome"] == "failed: ValueError: no such thing"
    killed = job_of(make_factory(tmp_path, trick="os.kill(os.getpid(), 9)"))
    assert "exit status -9" in measure_in_child(killed, [])["outcome"]


def test_an_update_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def step(self: Any, closure: Any = None) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    job = job_of(make_factory(tmp_path), optimizer="rmsprop")
    monkeypatch.setattr(torch.optim.RMSprop, "step", step)
    with pytest.raises(RunFailed, match="optimizer of step 1 updated"):
        run_here(job, tmp_path / "run")


def test_batch_statistics_forbid_smaller_batches(tmp_path: Path) -> None:
    trick = f"if len(batch['x']) > 4: {FORGED}"
    file = Path(make_factory(tmp_path, trick=trick).removesuffix(":factory"))
    file.write_text(file.read_text().replace("nn.GELU()", "nn.BatchNorm1d(WIDTH)"))
    with pytest.raises(RunFailed, match="batch norms"):
        run_here(job_of(f"{file}:factory"), tmp_path / "run")


def test_real_data_and_a_grouped_transformer_go_on_exactly(tmp_path: Path) -> None:
    """Text, tokenizer, tied weights, dropout, fp16's scaler: stopped after 4 of 6 steps."""
    (tmp_path / "text").mkdir()
    for number in range(8):
        words = " ".join(f"w{(i * number) % 97}" for i in range(1500))
        (tmp_path / "text" / f"{number}.txt").write_text(words)
    shape = {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": 300, "n_positions": 64}
    job = make_job({
        "model": {"name": "gpt2", "overrides": shape},
        "task": {"sequence_length": 32, "global_batch": 4, "steps": 6, "clip_grad_norm": 1.0},
        "data": {"path": str(tmp_path / "text"), "vocabulary": 300},
        "budget": {"device": "cpu"}, "run": {"threads": 1, "save_every": 3},
    })  # fmt: skip
    half = {"name": "mixed-precision", "dtype": "fp16"}
    whole = run_here(job, tmp_path / "whole", half)
    shorter = msgspec.structs.replace(job, task=msgspec.structs.replace(job.task, steps=4))
    run_here(shorter, tmp_path / "run", half)
    result = run_here(job, tmp_path / "run", half)
    assert result.losses == whole.losses and result.resumed_from == 4
    with pytest.raises(BadInput, match="data"):
        other = msgspec.structs.replace(job, data=msgspec.structs.replace(job.data, seed=1))
        run_here(other, tmp_path / "run")
    import torch
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step-00000006")
    assert saved.lm_head.weight is saved.transformer.wte.weight and torch.isfinite(saved.lm_head.weight).all()


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    job = job_of(make_factory(tmp_path), steps=2)
    run_here(job, tmp_path / "run")
    longer = msgspec.structs.replace(job, task=msgspec.structs.replace(job.task, steps=3))
    folder = tmp_path / "run/checkpoints/step-00000002"
    state = (folder / "state.pt").read_bytes()
    (folder / "state.pt").write_bytes(state[: len(state) // 2])
    with pytest.raises(BadInput, match=r"step-00000002: this checkpoint cannot be read"):
        run_here(longer, tmp_path / "run")
    (folder / "state.pt").write_bytes(state)
    file = Path(job.model.name.removesuffix(":factory"))
    file.write_text(file.read_text().replace("range(4)", "range(5)"))
    with pytest.raises(BadInput, match=r"not this model's: blocks\.4\.0\.bias"):
        run_here(longer, tmp_path / "run")


def test_live_plan(tmp_path: Path) -> None:
    import torch

    from memfit.api import wrap_batch
    from memfit.models import factory, step_from_parts
    from memfit.run.live import LivePlan
    from memfit.run.process import target_device

    job = job_of(make_factory(tmp_path, trick=f"if model.calls == 3 and len(batch['x']) > 8: {FORGED}"))
    model, batch, loss = factory._load_function(Path(job.model.name.removesuffix(":factory")), "factory")()

    def build(real: Any) -> Any:
        return lambda world: step_from_parts(real, batch, loss, job)

    live = LivePlan(plan_of(job), target_device("cpu"), build, wrap_batch)
    assert live.fits
    torch.manual_seed(0)
    prepared = live.apply(model)
    prepared.step(batch)
    assert prepared.verdict() is None
    for _ in range(3):
        prepared.step(batch)
    verdict = prepared.verdict()
    assert verdict.steps == 4 and verdict.recoveries == 1 and prepared.losses[-1] < prepared.losses[0]


# -- running -------------------------------------------------------------------------------------------------


def test_a_run_leaves_everything_in_its_folder(tmp_path: Path) -> None:
    job = job_of(make_factory(tmp_path, dropout=0.2))
    seen: list[dict[str, Any]] = []
    entries = ({"name": "micro-batch", "size": 8}, {"name": "checkpoint", "policy": "sqrt"})
    result = run_planned(job, plan_of(job, *entries), tmp_path / "run", seen.append)
    assert [event["step"] for event in seen] == [1, 2, 3, 4, 5, 6]
    keys = {"step", "steps", "loss", "items_per_second", "memory_bytes", "peak_bytes", "budget_bytes"}
    assert all(set(event) == keys for event in seen)
    assert len(result.losses) == 6 and result.losses[-1] < result.losses[0]
    assert result.measured.origin == "measured" and result.measured.process_bytes > 50 * MIB
    assert result.verdict.within_budget and result.verdict.steps == 6 and result.verdict.recoveries == 0
    assert json.dumps(result.to_json())
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names == {
        ".lock", "job.toml", "plan.json", "plan.full.json.gz", "predicted.json.gz", "losses.jsonl",
        "measured.json.gz", "verdict.json", "result.json", "log.txt", "checkpoints",
    }  # fmt: skip
    saved = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step-00000004", "step-00000006"]
    from safetensors import safe_open

    with safe_open(tmp_path / "run/checkpoints/step-00000006/model.safetensors", "pt") as file:
        assert "blocks.3.0.weight" in file.keys()  # noqa: SIM118  # the model's own name, though blocks were grouped
    again = run_planned(job, plan_of(job), tmp_path / "run")
    assert again.losses == result.losses and "are done" in again.notes[-1]
    with pytest.raises(BadInput, match=r"task\.learning_rate: 0\.01 -> 0\.02"):
        other = job_of(job.model.name, learning_rate=0.02)
        run_planned(other, plan_of(other), tmp_path / "run")


def test_killed_and_started_again_gives_the_same_curve(tmp_path: Path) -> None:
    """SIGKILL in the middle of a step, twice: once before anything is saved, once after."""
    whole = job_of(make_factory(tmp_path, dropout=0.3), steps=7)
    undisturbed = run_here(whole, tmp_path / "whole").losses
    mark = tmp_path / "mark"
    kill = f"""
    open({str(mark)!r}, 'a').write('x')
    if os.path.getsize({str(mark)!r}) in (1, 7): os.kill(os.getpid(), 9)
    """
    kill = textwrap.indent(textwrap.dedent(kill), "    ").strip()
    job = job_of(make_factory(tmp_path, dropout=0.3, trick=kill), steps=7)
    for _ in range(2):
        with pytest.raises(RunFailed, match="SIGKILL"):
            run_planned(job, plan_of(job), tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / ".saving-1").mkdir()
    result = run_planned(job, plan_of(job), tmp_path / "run")
    assert result.losses == undisturbed
    assert result.resumed_from == 4
    assert not (tmp_path / "run" / "checkpoints" / ".saving-1").exists()


def test_recovery_from_a_real_out_of_memory(wide: Any, tmp_path: Path) -> None:
    """The plan is too optimistic: 16 rows do not fit, 8 do. The curve is that of an undisturbed run."""
    job, plain, small = wide
    undisturbed = run_here(job, tmp_path / "whole")
    result = run_planned(job, plan_of(job, budget=between(plain, small)), tmp_path / "run")
    assert result.losses == pytest.approx(undisturbed.losses, rel=1e-5)
    assert result.verdict.within_budget and result.verdict.recoveries == 1
    (incident,) = result.incidents
    assert (incident["step"], incident["micro_batch"], incident["next_micro_batch"]) == (1, 16, 8)
    assert any("16 -> 8" in note for note in result.notes)


def test_recovery_in_the_recorded_step_and_resume_with_the_smaller_batch(tmp_path: Path) -> None:
    job = job_of(make_factory(tmp_path), steps=4)
    undisturbed = run_here(job, tmp_path / "whole")
    trick = f"if model.calls == 2 and len(batch['x']) > 4: {FORGED}"
    job = job_of(make_factory(tmp_path, trick=trick.replace("== 2", "in (2, 3)")), steps=4)
    result = run_here(job, tmp_path / "run")
    assert result.losses == pytest.approx(undisturbed.losses, rel=1e-5)
    assert [i["next_micro_batch"] for i in result.incidents] == [8, 4]
    longer = msgspec.structs.replace(job, task=msgspec.structs.replace(job.task, steps=6))
    assert run_here(longer, tmp_path / "run").resumed_from == 4
    assert {row.micro_batch for row in RunFolder(tmp_path / "run").losses()[1:]} == {4}


def test_out_of_memory_that_nothing_helps(wide: Any, tmp_path: Path) -> None:
    job = job_of(make_factory(tmp_path, trick=f"if model.calls > 3: {FORGED}"), steps=6)
    with pytest.raises(RunFailed, match=r"in forward of step 4 at a micro-batch of 1.*step-00000002"):
        run_here(job, tmp_path / "run")
    assert len(RunFolder(tmp_path / "run").incidents()) == 4
    tight = job_of(make_factory(tmp_path, width=4096))
    held = wide[1]["start_bytes"]
    with pytest.raises(RunFailed, match="before the first step"):
        run_planned(tight, plan_of(tight, budget=held + 64 * MIB), tmp_path / "tight")
    with pytest.raises(DoesNotFit):
        run_planned(job, plan_of(job, fits=False), tmp_path / "none")


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    trick = "if model.calls == 4: return model(batch['x']).sum() * float('nan')"
    job = job_of(make_factory(tmp_path, trick=trick))
    with pytest.raises(RunFailed, match=r"step 4 is nan.*\(step 3\).*step-00000002"):
        run_here(job, tmp_path / "run")


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    job = job_of(make_factory(tmp_path))
    with RunFolder(tmp_path / "run").locked(), pytest.raises(BadInput, match=f"process {os.getpid()}"):
        run_planned(job, plan_of(job), tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("a")
    with pytest.raises(BadInput, match="no run folder"):
        run_planned(job, plan_of(job), tmp_path / "mine")


def test_disk_full_while_saving(tmp_path: Path) -> None:
    """No file may grow beyond 1 MiB from the third step on: saving at step 4 fails, step 2 is kept."""
    limit = "if model.calls == 3: import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, -1))"
    job = job_of(make_factory(tmp_path, width=512, trick=limit))
    with pytest.raises(RunFailed, match=r"saving at step 4 failed.*step-00000002") as caught:
        run_planned(job, plan_of(job), tmp_path / "run")
    assert caught.value.exit_status == 3
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


PROGRAM = """
import sys
import msgspec
from memfit.core.errors import MemfitError
from memfit.core.plan import Plan
from memfit.run.launch import run_planned
plan = msgspec.json.decode(open(sys.argv[1], "rb").read(), type=Plan)
try:
    run_planned(plan.job, plan, sys.argv[2], lambda event: print(event["step"], flush=True))
except MemfitError as error:
    print(error, flush=True)
    sys.exit(error.exit_status)
"""


def start_run(plan: Plan, folder: Path) -> subprocess.Popen[str]:
    file = folder.with_suffix(".plan")
    file.write_bytes(msgspec.json.encode(plan))
    command = [sys.executable, "-c", PROGRAM, str(file), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.stdout.readline().strip() != "3":
        assert process.poll() is None
    return process


def test_interrupted_state_is_saved(tmp_path: Path) -> None:
    job = job_of(make_factory(tmp_path, trick="time.sleep(0.05)"), steps=200, run={"save_every": 0})
    process = start_run(plan_of(job), tmp_path / "run")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == Interrupted.exit_status, out
    assert "stopped by SIGINT after step" in out
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) >= 3


def test_killing_the_parent_ends_the_run(tmp_path: Path) -> None:
    job = job_of(make_factory(tmp_path, trick="time.sleep(0.05)"), steps=500)
    process = start_run(plan_of(job), tmp_path / "run")
    process.kill()
    process.communicate()
    rows = -1
    for _ in range(50):  # the worker is gone when the curve stops growing
        time.sleep(0.2)
        before, rows = rows, len(RunFolder(tmp_path / "run").losses())
        if rows == before:
            break
    assert rows < 100
    with RunFolder(tmp_path / "run").locked():
        pass


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    job = job_of(make_factory(tmp_path, trick="time.sleep(2 if model.calls > 3 else 0)"), steps=20)
    process = start_run(plan_of(job), tmp_path / "run")
    time.sleep(0.3)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == Interrupted.exit_status and "at once" in out
    assert time.monotonic() - started < 1.9
