"""``python -m memfit.run.child``: measures one job; request and result are JSON on standard input and
output."""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any

import msgspec

from memfit.core.job import Job
from memfit.run.process import Tell, claim_stdout, die_with_parent, one_line, start_libraries, target_device


def run(request: dict[str, Any], result: dict[str, Any]) -> None:
    """Fills ``result`` as far as the job gets (see :func:`memfit.run.measure.measure_in_child`)."""
    job = msgspec.convert(request["job"], Job)
    start_libraries(job)
    import torch

    from memfit.engines.in_process import prepare
    from memfit.models import build_step
    from memfit.run.measure import feeding_card, measure_step
    from memfit.run.memory import (
        anonymous_bytes,
        hard_limit,
        peak_anonymous_bytes,
        reset_peak,
        room_for_recorder,
        tidy,
    )
    from memfit.run.world import RealWorld
    from memfit.strategies import apply_all, read_strategy

    world = RealWorld(target_device(job.budget.device))
    tidy()
    result["start_bytes"] = anonymous_bytes()
    with ExitStack() as stack:
        if request["hard_limit_bytes"] is not None:
            stack.enter_context(hard_limit(request["hard_limit_bytes"]))
        result["where"] = "load"
        torch.manual_seed(job.run.seed)
        strategies = [read_strategy(entry) for entry in request["strategies"]]
        step = apply_all(strategies, build_step(job, world), world)
        prepared = feeding_card(prepare(step, world), world)
        window = step.make_batch(step.global_batch, world)
        losses = result["losses"]
        try:
            losses.append(float(prepared.run(window)))
            with room_for_recorder():
                loss, profile = measure_step(prepared, window, world)
            losses.append(loss)
            result |= {
                "peak_bytes": profile.peak_bytes, "host_peak_bytes": profile.host_peak_bytes,
                "breakdown": profile.breakdown(), "peak_at": msgspec.to_builtins(profile.peak_at),
            }  # fmt: skip
            card_process = profile.process_bytes
            del profile
            tidy()
            reset_peak()
            seconds = []
            for _ in range(request["steps"] - 2):
                started = time.perf_counter()
                losses.append(float(prepared.run(window)))
                seconds.append(time.perf_counter() - started)
            result["process_bytes"] = peak_anonymous_bytes() if world.device.type == "cpu" else card_process
            result["step_seconds"] = statistics.median(seconds)
        finally:
            result["where"] = world.phase_name
    result |= {"where": None, "outcome": "ran"}


def main(tell: Tell) -> None:
    from memfit.run.measure import empty_result
    from memfit.run.memory import is_out_of_memory

    result = empty_result()
    try:
        run(msgspec.json.decode(sys.stdin.buffer.read()), result)
    except BaseException as error:  # the process's edge: whatever happened is the answer
        result["outcome"] = "out-of-memory" if is_out_of_memory(error) else f"failed: {one_line(error)}"
    tell(result)


if __name__ == "__main__":
    die_with_parent()
    main(claim_stdout())
