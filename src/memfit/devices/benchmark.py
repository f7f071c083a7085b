"""The calibration's child: ``python -m memfit.devices.benchmark`` prints the figures of this CPU as JSON.

Shapes are those of a small transformer (width 512 to 768, sequences of 256), for kernels reach far less on
small matrices than on large ones. Outputs are allocated afresh, as a model's are, unless the name says
``in_place``. Bytes are those read plus those written.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from memfit.devices import limits

_LEAST_SECONDS = 0.15
_LEAST_RUNS = 5


def seconds_of(work: Callable[[], object], least: float = _LEAST_SECONDS) -> float:
    """Seconds of ``work``: the fastest of at least five runs and ``least`` seconds, after one to warm up.

    The fastest, for a busy machine makes runs slower only: with one core taken by another process, most
    parallel regions wait a scheduler tick (4 or 8 ms seen) for their second thread.
    """
    work()
    taken: list[float] = []
    started = time.perf_counter()
    while len(taken) < _LEAST_RUNS or time.perf_counter() - started < least:
        before = time.perf_counter()
        work()
        taken.append(time.perf_counter() - before)
    return min(taken)


def context_bytes() -> int:
    """Anonymous memory of a process that has imported what a run imports and made one small training step: kernels
    and the optimizer bring in modules, buffers and threads at their first use. The step's own tensors are gone."""
    import torch

    # Without the hf extra a run does not import it either.
    with contextlib.suppress(ImportError):
        import transformers.modeling_utils  # noqa: F401
    layer = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 64)
    )
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(2):
        layer(torch.randn(256, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return limits.process_status().get("RssAnon", 0)


def _matmuls(torch: Any, dtype: Any, shapes: list[tuple[int, int, int]]) -> float:
    """FLOP/s over ``shapes`` (rows, inner, columns), each weighted by its time."""
    work, seconds = 0.0, 0.0
    for rows, inner, columns in shapes:
        a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
        seconds += seconds_of(lambda a=a, b=b: a @ b)  # type: ignore[misc]
        work += 2.0 * rows * inner * columns
    return work / seconds


def compute(torch: Any) -> tuple[dict[str, float], dict[str, float]]:
    """(FLOP/s by dtype, FLOP/s by op class in float32)."""
    functional = torch.nn.functional
    a, b, out = torch.randn(1024, 1024), torch.randn(1024, 1024), torch.empty(1024, 1024)
    peak = 2.0 * 1024**3 / seconds_of(lambda: torch.mm(a, b, out=out))
    model = [(1024, 512, 2048), (512, 768, 768), (256, 512, 8192)]
    classes = {"matmul": _matmuls(torch, torch.float32, model)}
    low = [(512, 512, 1024)]
    flops = {
        "float32": max(peak, classes["matmul"]),
        "bfloat16": _matmuls(torch, torch.bfloat16, low),
        "float16": _matmuls(torch, torch.float16, [(128, 128, 256)]),
    }
    q, k = torch.randn(32, 256, 64), torch.randn(32, 64, 256)
    classes["bmm"] = 2.0 * 32 * 256 * 256 * 64 / seconds_of(lambda: torch.bmm(q, k))
    heads = torch.randn(4, 8, 256, 64)
    attention = seconds_of(
        lambda: functional.scaled_dot_product_attention(heads, heads, heads, is_causal=False)
    )
    classes["attention"] = 4.0 * 4 * 8 * 256 * 256 * 64 / attention
    image, kernel = torch.randn(4, 64, 56, 56), torch.randn(64, 64, 3, 3)
    convolution = seconds_of(lambda: functional.conv2d(image, kernel, padding=1))
    classes["conv"] = 2.0 * 4 * 64 * 64 * 9 * 56 * 56 / convolution
    return flops, classes


def traffic(torch: Any) -> tuple[float, dict[str, float]]:
    """(bytes per second of an elementwise operation that allocates nothing, the same by op class)."""
    functional = torch.nn.functional
    # 128 MiB each: caches of 32 to 96 MiB are common, and a pass over 32 MiB would measure those.
    large, addend = torch.ones(2**25), torch.ones(2**25)
    bandwidth = 3 * large.numel() * 4 / seconds_of(lambda: torch.add(large, addend, out=large))
    in_place = 2 * large.numel() * 4 / seconds_of(lambda: large.mul_(1.0))
    a, b = large[: 2**23], addend[: 2**23]
    size = a.numel() * 4
    small, other = torch.randn(2**13), torch.randn(2**13)  # 32 KiB: below the mapping threshold, in cache
    few, more = torch.randn(16), torch.randn(16)  # the same operator's cost without its bytes
    cached = max(seconds_of(lambda: small + other) - seconds_of(lambda: few + more), 2e-7)
    rows = torch.randn(1024, 4096)  # 16 MiB
    gain, offset = torch.ones(4096), torch.zeros(4096)
    vocabulary, tokens = torch.randn(32000, 256), torch.randint(32000, (8192,))
    transcendental = [
        lambda: functional.gelu(rows),
        lambda: torch.exp(rows),
        lambda: torch.log_softmax(rows, -1),
    ]
    seconds = sum(seconds_of(work) for work in transcendental)
    return bandwidth, {
        "elementwise": 3 * size / seconds_of(lambda: a + b),
        "elementwise_cached": 3 * small.numel() * 4 / cached,
        "in_place": in_place,
        "reduction": rows.numel() * 4 / seconds_of(lambda: rows.sum(-1)),
        "transcendental": len(transcendental) * 2 * rows.numel() * 4 / seconds,
        "normalisation": 2
        * rows.numel()
        * 4
        / seconds_of(lambda: functional.layer_norm(rows, (4096,), gain, offset)),
        "gather": 2 * tokens.numel() * 256 * 4 / seconds_of(lambda: functional.embedding(tokens, vocabulary)),
    }


def overhead_seconds(torch: Any) -> float:
    """Seconds of one operator on a few numbers, gradients recorded as in a training step."""
    x = torch.ones(16, requires_grad=True)

    def hundred() -> None:
        for _ in range(100):
            x * 2.0

    return seconds_of(hundred) / 100


def measure() -> dict[str, Any]:
    """All figures; the keys are those of :func:`memfit.devices.calibration.calibrate`."""
    load = os.getloadavg()[0]
    context = context_bytes()
    import torch

    overhead = overhead_seconds(torch)
    with torch.no_grad():
        flops, classes = compute(torch)
        bandwidth, by_class = traffic(torch)
    efficiency = {name: speed / flops["float32"] for name, speed in classes.items()}
    efficiency |= {name: speed / bandwidth for name, speed in by_class.items()}
    return {
        "flops": flops,
        "bandwidth": bandwidth,
        "efficiency": efficiency,
        "overhead_seconds": overhead,
        "context_bytes": context,
        "load": load,
    }


if __name__ == "__main__":
    json.dump(measure(), sys.stdout)
