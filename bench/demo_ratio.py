"""Seconds per step of memfit's plan against what people do by hand, all inside the same budget, in one run.

    python bench/demo_ratio.py [JOB] [--turns N]

The job is ``examples/glm_stdlib.toml``. (a) full checkpointing with the largest micro-batch that fits
the budget; (b) the micro-batch halved until it fits, nothing else. Whether something fits is measured (the
process's peak against the budget), as a person would find out. The contenders take turns, so that a busy
machine slows all of them. Writes ``bench/results/demo_ratio.json``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from memfit import api
from memfit.core.job import Job
from memfit.core.units import show_bytes
from memfit.run.measure import measure_in_child

ROOT = Path(__file__).parent.parent


def measured(job: Job, strategies: list[dict[str, Any]], budget: int, steps: int = 4) -> dict[str, Any]:
    found = measure_in_child(job, strategies, steps=steps, hard_limit_bytes=budget, budget=budget)
    found["fits"] = found["outcome"] == "ran" and found["within_budget"]
    print(f"  {strategies}: {found['outcome']}, process {show_bytes(found['process_bytes'] or 0)}, "
          f"{found['step_seconds'] or 0:.2f} s", flush=True)  # fmt: skip
    return found


def halving(job: Job, extra: list[dict[str, Any]], budget: int) -> list[dict[str, Any]] | None:
    """The largest micro-batch of batch, batch/2, batch/4 … that fits a measured step."""
    size = job.task.global_batch
    while True:
        cut = [] if size == job.task.global_batch else [{"name": "micro-batch", "size": size}]
        if measured(job, [*extra, *cut], budget, steps=3)["fits"]:
            return [*extra, *cut]
        if size == 1:
            return None
        size = -(-size // 2)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", nargs="?", default=ROOT / "examples/glm_stdlib.toml")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each contender (median)")
    options = parser.parse_args()
    job = api.load_job(options.job)
    made = api.plan(job)
    budget = made.budget_bytes
    print(
        f"budget {show_bytes(budget)}, plan {list(made.strategies)} (fits: {made.fits}, {made.seconds:.1f} s)"
    )
    contenders: dict[str, list[dict[str, Any]] | None] = {
        "memfit": list(made.strategies),
        "checkpointing": halving(job, [{"name": "checkpoint"}], budget),
        "halving": halving(job, [], budget),
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for _ in range(options.turns):
        for name, strategies in contenders.items():
            if strategies is not None:
                runs[name].append(measured(job, strategies, budget))
    seconds = {n: statistics.median(r["step_seconds"] for r in rs if r["step_seconds"])
               for n, rs in runs.items() if any(r["step_seconds"] for r in rs)}  # fmt: skip
    ratios = {n: seconds[n] / seconds["memfit"] for n in seconds if n != "memfit" and "memfit" in seconds}
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "budget_bytes": budget,
        "load": os.getloadavg(), "plan_fits": made.fits, "predicted_seconds": made.profile.step_seconds,
        "seconds": seconds, "ratios": ratios,
        "contenders": {n: {"strategies": s, "within_budget": [r["fits"] for r in runs[n]],
                           "process_bytes": [r["process_bytes"] for r in runs[n]],
                           "step_seconds": [r["step_seconds"] for r in runs[n]]} for n, s in contenders.items()},
    }  # fmt: skip
    (ROOT / "bench/results").mkdir(exist_ok=True)
    (ROOT / "bench/results/demo_ratio.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, strategies in contenders.items():
        if name not in seconds:
            print(f"{name}: nothing that fits the budget ({strategies})")
        else:
            print(f"{name}: {seconds[name]:.2f} s a step, {ratios.get(name, 1.0):.2f} times memfit's")
    return 0 if "memfit" in seconds and all(r["fits"] for r in runs["memfit"]) else 1


if __name__ == "__main__":
    sys.exit(main())
