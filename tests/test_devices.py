"""Devices: the catalogue, this machine's limits and calibration, and the allocator models."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit import devices
from memfit.core.errors import BadInput
from memfit.core.units import GIB, MIB
from memfit.core.words import has, say
from memfit.devices import calibration, cpu, detect, limits, shelf
from memfit.devices.allocators import CachingAllocator, CpuAllocator, OutOfSpace, allocator_for
from memfit.devices.allocators.blocks import round_size, segment_size
from memfit.devices.allocators.cpu import mapped_size

# Reference traces of real runs; they belong to the workplace, not to the project.
TRACES = Path(os.environ.get("MEMFIT_TRACES", "/work/shared/snapshots/traces"))
NAMES = [
    *("h200", "h100", "h20", "a100-40gb", "a100-80gb", "a800", "l40s", "l20", "a10", "l4", "t4"),
    *("v100-16gb", "v100-32gb", "rtx-3060", "rtx-3090", "rtx-4090", "rtx-4090d", "rtx-5090"),
    *("rtx-pro-6000", "b200", "mi300x", "ascend-910b"),
]


@pytest.fixture(autouse=True)
def no_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMFIT_NO_CALIBRATION", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


# ---------------------------------------------------------------------- catalogue


@pytest.mark.parametrize("name", NAMES)
def test_entry_is_complete(name: str) -> None:
    device, entry = devices.get_device(name), shelf.entries()[name]
    assert device.name == name and device.title and device.vendor
    assert device.kind in {"cuda", "rocm", "npu"}
    assert 8 * GIB < device.memory_bytes < 300 * GIB
    assert 1e11 < device.bandwidth < 1e13
    assert device.multiprocessors > 0 and device.host_link > 1e10
    assert 100 * MIB < device.context_bytes < GIB
    assert device.flops["float32"] <= device.flops["float16"]
    assert device.sources and all(device.sources)
    assert device.origin == "assumed"
    assert {"matmul", "bmm", "attention", "conv", "elementwise", "gather"} <= set(device.efficiency)
    keys = set(entry.__struct_fields__) | {f"flops.{dtype}" for dtype in entry.flops}
    assert set(entry.unverified) <= keys


def test_names_and_aliases_are_unique() -> None:
    aliases = [alias for entry in shelf.entries().values() for alias in entry.aliases]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & set(devices.names())
    assert set(NAMES) | {"cpu", "auto"} == set(devices.names())
    assert [d.name for d in devices.table()] == [*shelf.devices(), "cpu"]


@pytest.mark.parametrize(
    ("alias", "name"), [("A100", "a100-80gb"), ("RTX 4090", "rtx-4090"), ("910b", "ascend-910b")]
)
def test_aliases(alias: str, name: str) -> None:
    assert devices.get_device(alias).name == name


def test_unknown_name_says_the_valid_ones() -> None:
    with pytest.raises(BadInput) as caught:
        devices.get_device("rtx-409")
    text = str(caught.value)
    assert "budget.device" in text and "rtx-409" in text and "h200" in text and "did you mean" in text
    with pytest.raises(BadInput) as caught:
        devices.get_device("???")
    assert caught.value.key == "input.unknown_name"


def test_unknown_key_in_a_catalogue_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text((shelf.FOLDER / "others.toml").read_text().replace("bandwidth =", "bandwith =", 1))
    with pytest.raises(BadInput, match="bandwi"):
        shelf.read_entries(file)


def test_importing_and_listing_loads_no_torch() -> None:
    code = (
        "import sys; from memfit import devices; devices.table(); devices.get_device('h200');"
        "print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_words_in_both_languages() -> None:
    figures = {"requested": 1, "allocated": 1, "reserved": 1, "capacity": 1, "reason": "x", "seconds": 9}
    for key in ("out_of_space", "catalogue", "calibration_failed", "calibrating"):
        assert has(f"device.{key}")
        assert say(f"device.{key}", lang="zh", **figures) != say(f"device.{key}", lang="en", **figures)


def test_card_as_the_driver_shows_it() -> None:
    seen = SimpleNamespace(
        name="NVIDIA A100-SXM4-40GB", total_memory=42_298_834_944, major=8, minor=0, multi_processor_count=108
    )
    assert detect.from_properties(seen).name == "a100-40gb"
    unknown = SimpleNamespace(
        name="NVIDIA GeForce RTX 4080", total_memory=16 * GIB, major=8, minor=9, multi_processor_count=76
    )
    device = detect.from_properties(unknown)
    assert device.name == "rtx-4080" and device.memory_bytes == 16 * GIB and device.architecture == "sm_89"
    bound = SimpleNamespace(
        name="NVIDIA GeForce RTX 4090",
        total_memory=25_250_000_000,
        major=8,
        minor=9,
        multi_processor_count=128,
    )
    assert detect.from_properties(bound).name == "rtx-4090"


# ---------------------------------------------------------------------- this machine


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    layout = {
        "proc/meminfo": "MemTotal: 1048576 kB\nMemAvailable: 786432 kB\n",
        "proc/self/cgroup": cgroup,
        "proc/self/status": "VmData: 1024 kB\nVmSize: 4096 kB\n",
        **files,
    }
    for path, text in layout.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_cgroup_v2_takes_the_least_up_the_hierarchy(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "0::/pod/box\n",
        {
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{512 * MIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{300 * MIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {100 * MIB}\n",
        },
    )
    assert limits.control_groups(root) == [(512 * MIB, 200 * MIB)]
    assert limits.limit_bytes(root) == 512 * MIB
    assert limits.available_bytes(root) == 312 * MIB


def test_cgroup_v1_and_a_path_that_only_the_host_has(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n",
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{256 * MIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{56 * MIB}\n",
        },
    )
    assert limits.limit_bytes(root) == 256 * MIB
    assert limits.available_bytes(root) == 200 * MIB


def test_no_limit_means_the_machine(tmp_path: Path) -> None:
    root = machine(
        tmp_path, "4:memory:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    )
    assert limits.control_groups(root) == []
    assert limits.limit_bytes(root) == GIB
    assert limits.available_bytes(root) == 768 * MIB


def test_resource_limit_counts() -> None:
    code = (
        "import resource; from memfit.devices import cpu; s = 3 * 2**30;"
        "resource.setrlimit(resource.RLIMIT_DATA, (s, s));"
        "print(cpu.device(measure=False).memory_bytes, cpu.available_bytes() < s)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split()[1] == "True" and int(out.stdout.split()[0]) <= 3 * GIB


def test_cpu_without_calibration_is_assumed() -> None:
    device = devices.get_device("cpu")
    assert device.is_cpu and device.origin == "assumed"
    assert device.flops["float32"] > 1e9 and device.bandwidth > 1e9
    assert 0 < cpu.available_bytes() <= device.memory_bytes


FIGURES = {
    "flops": {"float32": 1e11, "bfloat16": 1e10},
    "bandwidth": 2e10,
    "efficiency": {"matmul": 0.9},
    "overhead_seconds": 3e-6,
    "context_bytes": 200 * MIB,
    "load": 0.1,
}


def test_calibration_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    runs: list[int] = []
    monkeypatch.setattr(calibration, "_measure_in_child", lambda: runs.append(1) or dict(FIGURES))
    monkeypatch.delenv("MEMFIT_NO_CALIBRATION")
    assert not calibration.is_calibrated()
    assert devices.table()[-1].origin == "assumed" and not runs  # listing never measures
    first = devices.get_device("cpu")
    assert calibration.is_calibrated() and first.origin == "measured"
    assert (first.bandwidth, first.flops, first.context_bytes) == (2e10, FIGURES["flops"], 200 * MIB)
    assert devices.get_device("cpu") == first and len(runs) == 1
    calibration.calibrate(force=True)
    assert len(runs) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "77")  # another key
    assert not calibration.is_calibrated()
    calibration.cache_file().write_text("{")  # cut short
    assert not calibration.is_calibrated()


def test_calibration_of_a_busy_machine_is_repeated_when_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    loads = iter([3.0, 0.1])
    monkeypatch.setattr(calibration, "_measure_in_child", lambda: {**FIGURES, "load": next(loads)})
    monkeypatch.setattr(calibration, "_is_busy", lambda: True)
    assert calibration.calibrate()["load"] == calibration.calibrate()["load"] == 3.0
    monkeypatch.setattr(calibration, "_is_busy", lambda: False)
    monkeypatch.delenv("MEMFIT_NO_CALIBRATION")
    assert cpu.device(measure=False).origin == "measured"  # and did not measure: the next line does
    assert calibration.calibrate()["load"] == calibration.calibrate()["load"] == 0.1


@pytest.mark.slow
def test_calibration_for_real() -> None:
    pytest.importorskip("torch")
    found = calibration.calibrate()
    assert 1e9 < found["flops"]["float32"] < 1e14
    assert 1e8 < found["bandwidth"] < 1e13
    assert set(cpu.device(measure=False).efficiency) == set(found["efficiency"])
    assert all(value > 0 for value in found["efficiency"].values())
    assert 50 * MIB < found["context_bytes"] < 2 * GIB


# ---------------------------------------------------------------------- allocators


def test_rounding() -> None:
    assert [round_size(n) for n in (1, 512, 513, MIB + 1)] == [512, 512, 1024, MIB + 512]
    assert segment_size(512) == segment_size(MIB) == 2 * MIB
    assert segment_size(MIB + 512) == segment_size(10 * MIB - 512) == 20 * MIB
    assert segment_size(10 * MIB) == 10 * MIB and segment_size(10 * MIB + 512) == 12 * MIB
    assert mapped_size(1000) == 0 and mapped_size(65536) == 69632 and mapped_size(MIB) == MIB + 4096


def test_remainder_of_a_large_block_stays_with_it() -> None:
    allocator = CachingAllocator(None)
    first = allocator.malloc(19 * MIB + 512)  # of a segment of 20 MiB of its own: less than 1 MiB is left
    assert allocator.block_size(first) == allocator.allocated == allocator.reserved == 20 * MIB
    second = allocator.malloc(3 * MIB)  # of a 20 MiB segment: the rest is split off
    assert allocator.block_size(second) == 3 * MIB and allocator.inactive_split == 17 * MIB


def test_out_of_space_after_the_cache_went_back() -> None:
    allocator = CachingAllocator(40 * MIB)
    allocator.free(allocator.malloc(24 * MIB))
    held = allocator.malloc(30 * MIB)  # fits only because the cached 24 MiB went back
    assert allocator.reserved == 30 * MIB and allocator.retries == 1
    with pytest.raises(OutOfSpace) as caught:
        allocator.malloc(11 * MIB)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.requested, error.allocated, error.reserved, error.capacity) == (
        11 * MIB,
        30 * MIB,
        30 * MIB,
        40 * MIB,
    )
    assert "11.0 MiB" in str(error)
    allocator.free(held)
    allocator.malloc(11 * MIB)


def test_max_split_size_keeps_large_blocks_for_large_requests() -> None:
    allocator = CachingAllocator(120 * MIB, max_split_size=32 * MIB)
    allocator.free(allocator.malloc(64 * MIB))
    allocator.malloc(16 * MIB)
    assert allocator.reserved == 80 * MIB  # the cached 64 MiB is too large to be split for 16
    allocator.malloc(44 * MIB)  # nor may a block of 44 + 20 MiB or more be taken whole
    assert allocator.reserved == 60 * MIB  # so it went back, and a segment of 44 MiB came


def test_expandable_segment_grows_by_granules_and_gives_back_its_tail() -> None:
    allocator = CachingAllocator(None, expandable_segments=True)
    first, second = allocator.malloc(30 * MIB), allocator.malloc(30 * MIB)
    assert allocator.reserved == 60 * MIB and allocator.allocated == 60 * MIB
    allocator.free(second)
    third = allocator.malloc(50 * MIB)  # the free tail of 30 MiB, and one more granule
    assert allocator.reserved == 80 * MIB
    allocator.free(third)
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_double_free_is_a_mistake() -> None:
    for allocator in (CachingAllocator(None), CpuAllocator(None)):
        handle = allocator.malloc(100)
        allocator.free(handle)
        with pytest.raises(ValueError):
            allocator.free(handle)
        assert allocator.malloc(0) == 0
        allocator.free(0)


SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 64 * MIB),
    st.sampled_from([MIB, 10 * MIB, 65536]),
)
STEPS = st.lists(st.tuples(SIZES, st.integers(0, 1), st.integers(0, 5)), max_size=60)
KINDS = {
    "cuda": lambda: CachingAllocator(200 * MIB),
    "expandable": lambda: CachingAllocator(200 * MIB, expandable_segments=True),
    "max-split": lambda: CachingAllocator(200 * MIB, max_split_size=20 * MIB),
    "cpu": lambda: CpuAllocator(200 * MIB),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_allocator_laws(kind: str, steps: list[tuple[int, int, int]]) -> None:
    allocator = KINDS[kind]()
    live: list[int] = []
    for size, stream, action in steps:
        if action == 0 and live:
            allocator.free(live.pop(size % len(live)))
        elif action == 1:
            allocator.empty_cache()
        else:
            try:
                live.append(allocator.malloc(size, stream))
            except OutOfSpace as error:
                assert error.requested == size
        assert 0 <= allocator.requested <= allocator.allocated <= allocator.reserved <= 200 * MIB
        assert (
            allocator.reserved <= allocator.peak_reserved and allocator.allocated <= allocator.peak_allocated
        )
        assert 0 <= allocator.inactive_split <= allocator.reserved
    for handle in live:
        allocator.free(handle)
    allocator.empty_cache()
    assert allocator.requested == allocator.allocated == allocator.reserved == 0


def test_allocator_for() -> None:
    h100 = devices.get_device("h100")
    allocator = allocator_for(h100)
    assert isinstance(allocator, CachingAllocator)
    assert allocator.capacity_bytes == h100.memory_bytes - h100.context_bytes
    assert isinstance(allocator_for(devices.get_device("cpu"), capacity=GIB), CpuAllocator)


def replay(trace: dict[str, Any], capacity: int | None = None) -> CachingAllocator:
    """A recorded sequence through the model. Where the capacity is not known, the model is told to empty its
    cache whenever the real allocator gave segments back; where it is, the model must come to that itself."""
    allocator = CachingAllocator(capacity, expandable_segments=trace["expandable"])
    blocks: dict[int, list[tuple[int, int, int, int]]] = {}
    for number, requested, size, segment, offset in trace["init_blocks"]:
        blocks.setdefault(segment, []).append((offset, size, requested, number))
    handles: dict[int, int] = {}
    for segment, size in enumerate(trace["init_segments"]):
        there = blocks.get(segment, [])
        given_back = allocator.adopt_segment(size, [block[:3] for block in there])
        handles.update(zip((block[3] for block in there), given_back, strict=True))
    emptied = False
    for event in trace["events"]:
        if event[0] == "a":
            handles[event[1]] = allocator.malloc(event[2], event[4])
        elif event[0] == "f":
            allocator.free(handles.pop(event[1]))
        elif event[0] == "segment_free" and not emptied and capacity is None:
            allocator.empty_cache()
        emptied = event[0] == "segment_free"
    return allocator


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"no reference traces at {TRACES}")
@pytest.mark.parametrize("file", sorted(TRACES.glob("*.json.gz")), ids=lambda f: f.name.split(".json")[0])
def test_replay_of_a_real_trace_is_exact(file: Path) -> None:
    with gzip.open(file) as stream:
        trace = json.load(stream)
    allocator, peak = replay(trace), trace["peak"]
    assert allocator.peak_requested == peak["requested"]
    assert allocator.peak_allocated == peak["allocated"]
    assert allocator.peak_reserved == peak["reserved"]
    assert (allocator.allocated, allocator.reserved) == (trace["end"]["allocated"], trace["end"]["reserved"])


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"no reference traces at {TRACES}")
def test_retry_near_the_limit_of_a_real_card() -> None:
    """A 24 GiB card's cache went back in the middle of this run; the record bounds the capacity."""
    with gzip.open(TRACES / "nca-conv.inference2_peso_oct.3e8a.d0.json.gz") as stream:
        trace = json.load(stream)
    least = trace["peak"]["reserved"]
    for capacity in (least, least + 300 * MIB, 26_994_540_543):
        allocator = replay(trace, capacity)
        assert allocator.retries == 1
        assert allocator.peak_reserved == least and allocator.reserved == trace["end"]["reserved"]
