"""Law Square on models of 5 to 40 M parameters: predicted against measured, each in a fresh child process.

    python bench/square.py [--only WORD] [--seconds LIMIT]

Prints a table, writes ``bench/results/square.json`` and ends with status 1 if an allocated peak is more than 1 %
or a process peak more than 5 % from its prediction. The device is this machine's CPU, its context as the product
takes it (measured once, kept in the cache).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # on a busy machine threads that spin slow each other down

from memfit.core.job import make_job
from memfit.core.units import show_bytes
from memfit.devices import get_device
from memfit.models import build_step
from memfit.run.measure import measure_in_child
from memfit.simulate.simulator import simulate
from memfit.strategies import read_strategy

RESULTS = Path(__file__).parent / "results"
ALLOCATED, PROCESS = 0.01, 0.05
DENSE = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
         "head_dim": 64, "intermediate_size": 1024, "vocab_size": 16384}  # fmt: skip
BERT = {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "intermediate_size": 1536}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "glm": ({"name": "glm-4-9b", "overrides": DENSE}, {"sequence_length": 128, "global_batch": 6}),
    "gpt2": ({"name": "gpt2", "overrides": {"n_embd": 384, "n_layer": 8, "n_head": 6, "vocab_size": 8192}},
             {"sequence_length": 128, "global_batch": 6}),
    "bert": ({"name": "bert-base-uncased", "overrides": {**BERT, "vocab_size": 8192}},
             {"sequence_length": 128, "global_batch": 6}),
    "vit": ({"name": "vit-base", "overrides": {**BERT, "image_size": 224}}, {"global_batch": 6}),
    "moe": ({"name": "qwen3-30b-a3b", "overrides": {
                 "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2,
                 "vocab_size": 8192}}, {"sequence_length": 128, "global_batch": 6}),
    "resnet": ({"name": "resnet-50"}, {"global_batch": 6}),
}  # fmt: skip
CHECKPOINT = {"name": "checkpoint"}
CHUNKED = {"name": "chunked-loss", "tokens": 256}
SMALL = {"name": "micro-batch", "size": 2}
FUSED = {"name": "fused-optimizer"}
FOREACH = {"name": "fused-optimizer", "kind": "foreach"}
HALF = {"name": "mixed-precision"}
PLANS: dict[str, list[list[dict[str, Any]]]] = {
    "glm": [[], [CHECKPOINT], [{**CHECKPOINT, "policy": "selective", "blocks": 3}], [CHUNKED], [SMALL],
            [{**SMALL, "size": 3}], [FUSED], [FOREACH], [HALF], [CHECKPOINT, CHUNKED, FUSED, SMALL],
            [HALF, CHUNKED, CHECKPOINT]],
    "gpt2": [[], [CHECKPOINT], [{**CHECKPOINT, "policy": "sqrt"}, CHUNKED], [SMALL, FUSED], [HALF]],
    "bert": [[], [CHECKPOINT, FUSED], [SMALL], [HALF]],
    "vit": [[], [CHECKPOINT], [SMALL, FOREACH], [HALF]],
    "moe": [[], [CHECKPOINT, CHUNKED], [SMALL], [HALF]],
    "resnet": [[], [FUSED]],
}  # fmt: skip


def label(plan: list[dict[str, Any]]) -> str:
    return " + ".join(" ".join(str(v) for v in s.values()) for s in plan) or "(nothing)"


def measure(model: str, plan: list[dict[str, Any]]) -> dict[str, Any]:
    """One row: a combination predicted and measured."""
    started = time.perf_counter()
    table, task = MODELS[model]
    job = make_job({"model": table, "task": task, "budget": {"device": "cpu"}})
    row: dict[str, Any] = {"model": model, "plan": plan, "strategies": label(plan)}
    try:
        predicted = simulate(
            lambda w: build_step(job, w), [read_strategy(s) for s in plan], get_device("cpu")
        )
    except (
        Exception
    ) as error:  # a row that cannot be predicted is a row that missed, not the end of the bench
        return {**row, "outcome": f"not predicted: {error}", "seconds": time.perf_counter() - started}
    found = measure_in_child(job, plan, steps=3)
    row |= {"outcome": found["outcome"], "predicted_peak_bytes": predicted.peak_bytes, "measured_peak_bytes": found["peak_bytes"],
            "predicted_process_bytes": predicted.process_bytes, "measured_process_bytes": found["process_bytes"],
            "reserved": predicted.reserved_bytes, "start_bytes": found["start_bytes"],
            "predicted_at": predicted.peak_at.op, "measured_at": (found["peak_at"] or {}).get("op"),
            "step_seconds": found["step_seconds"]}  # fmt: skip
    for kind in ("peak", "process"):
        real = row[f"measured_{kind}"]
        row[f"{kind}_error"] = (row[f"predicted_{kind}"] - real) / real if real else None
    return {**row, "seconds": time.perf_counter() - started}


def missed(row: dict[str, Any]) -> bool:
    return (
        row["outcome"] != "ran" or abs(row["peak_error"]) > ALLOCATED or abs(row["process_error"]) > PROCESS
    )


def show(row: dict[str, Any]) -> str:
    start = f"{row['model']:7}{label(row['plan']):58}"
    if row["outcome"] != "ran":
        return f"{start}{row['outcome'][:90]}"
    figures = "".join(
        f"{show_bytes(row[f'predicted_{k}']):>11} /{show_bytes(row[f'measured_{k}']):>11} {row[f'{k}_error']:+7.2%}"
        for k in ("peak", "process")
    )
    return f"{start}{figures} {row['seconds']:6.1f} s {'MISSED' if missed(row) else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="models whose name has this in it")
    parser.add_argument("--seconds", type=float, help="start no further row after this long")
    options = parser.parse_args()
    import torch

    get_device("cpu")  # calibrates, where that has not been done
    started = time.perf_counter()
    print(
        f"{'model':7}{'plan':58}{'allocated: predicted / measured':^33}{'process: predicted / measured':^33}"
    )
    rows: list[dict[str, Any]] = []
    left_out: list[list[Any]] = []
    # Turn by turn, so that a time limit leaves out the tail of every model and not a whole model.
    order = [
        (m, p)
        for turn in range(max(map(len, PLANS.values())))
        for m, ps in PLANS.items()
        for p in ps[turn : turn + 1]
    ]
    for model, plan in order:
        if options.only and options.only not in model:
            continue
        if options.seconds and time.perf_counter() - started > options.seconds:
            left_out.append([model, plan])
            continue
        rows.append(measure(model, plan))
        print(show(rows[-1]), flush=True)
        write("square" if not options.only else f"square-{options.only}", {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "torch": torch.__version__,
            "machine": machine(), "rows": rows, "left_out": left_out,
        })  # fmt: skip
    bad = [r for r in rows if missed(r)]
    print(f"{len(rows)} rows, {len(bad)} missed, {len(left_out)} left out for time")
    return 1 if bad or left_out else 0


def machine() -> dict[str, Any]:
    names = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    return {"cpu": names[0] if names else platform.machine(), "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(), "python": platform.python_version()}  # fmt: skip


def write(name: str, content: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
