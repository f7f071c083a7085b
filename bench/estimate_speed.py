"""How long an answer takes: GLM-4-9B, full fine-tune, sequence 2048, on an H100, in a fresh process each.

    python bench/estimate_speed.py

Seconds of ``estimate`` and ``plan`` after imports, the process's peak resident memory, and ``memfit --help``.
Writes ``bench/results/estimate_speed.json``.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
CHILD = """
import json, resource, sys, time
started = time.perf_counter()
from memfit import api
import torch, transformers.modeling_utils, torch._dynamo
imports = time.perf_counter() - started
job = api.load_job({"model": {"name": "glm-4-9b", "dtype": DTYPE},
                       "task": {"sequence_length": 2048, "global_batch": 8}, "budget": {"device": "h100"}})
started = time.perf_counter()
found = getattr(api, sys.argv[1])(job)
seconds = time.perf_counter() - started
profile = getattr(found, "profile", found)
print(json.dumps({"imports_seconds": imports, "seconds": seconds, "peak_bytes": profile.peak_bytes,
    "fits": getattr(found, "fits", None), "simulations": getattr(found, "simulations", 1),
    "strategies": list(getattr(found, "strategies", ())),
    "rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    "largest_worker_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss}))
"""


def child(what: str, dtype: str) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", CHILD.replace("DTYPE", repr(dtype)), what], capture_output=True,
                          text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})  # fmt: skip
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["?"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def help_seconds() -> float:
    """The median of five."""
    command = [str(Path(sys.executable).parent / "memfit"), "--help"]
    times = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        times.append(time.perf_counter() - started)
    return sorted(times)[2]


def main() -> int:
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "load": os.getloadavg(),
        "estimate": child("estimate", "float32"), "plan": child("plan", "float32"),
        "estimate_bfloat16": child("estimate", "bfloat16"), "plan_bfloat16": child("plan", "bfloat16"),
        "help_seconds": help_seconds(),
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "estimate_speed.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    return 1 if any("failed" in v for v in result.values() if isinstance(v, dict)) else 0


if __name__ == "__main__":
    sys.exit(main())
