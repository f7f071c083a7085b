"""From a trace to a Profile: replay through the allocator's model, peak, phases, seconds."""

from __future__ import annotations

from memfit.core.device import Device
from memfit.core.profile import Allocation, PeakAt, Phase, Profile
from memfit.devices.allocators import allocator_for
from memfit.simulate.trace import ALLOC, FREE, Trace

UNLIMITED = 1 << 60  # a profile says what is needed; whether it fits is asked of the budget afterwards


def profile_of(
    trace: Trace, device: Device, *, origin: str, step_seconds: float, phase_seconds: dict[int, float] | None = None,
    assumptions: tuple[str, ...] = (), process_bytes: int | None = None, uncertainty: tuple[float, float] = (0.03, 0.25),
) -> Profile:  # fmt: skip
    """A Profile of a trace. ``process_bytes``: measured ones; left out, reserved plus the device's context.

    Sizes of zero are left out. The event axis counts births and deaths.
    """
    replay = allocator_for(device, UNLIMITED)
    handles: dict[int, int] = {}
    sizes: dict[int, int] = {}
    born: dict[int, int] = {}
    died: dict[int, int] = {}
    level = host = peak = host_peak = index = peak_index = 0
    peak_number = 0
    phases: list[Phase] = []
    phase_start, phase_name, phase_peak, count = 0, "load", 0, 0
    peak_phase = "load"

    def close_phase() -> None:
        if index > phase_start:
            seconds = (phase_seconds or {}).get(count, 0.0)
            phases.append(Phase(name=phase_name, start=phase_start, stop=index, peak_bytes=phase_peak,
                                end_bytes=level, seconds=seconds))  # fmt: skip

    for kind, number, _ in trace.events:
        if kind == ALLOC:
            storage = trace.storages[number]  # type: ignore[index]
            size = storage.size
            born[number] = index  # type: ignore[index]
            index += 1
            if storage.place == "host":
                sizes[number] = size  # type: ignore[index]
                host += size
                host_peak = max(host_peak, host)
                continue
            if size:
                handle = handles[number] = replay.malloc(size)  # type: ignore[index]
                if not device.is_cpu:  # a GPU's counters show blocks, a CPU's tensors what they asked for
                    size = replay.block_size(handle)
            sizes[number] = size  # type: ignore[index]
            level += size
            phase_peak = max(phase_peak, level)
            if level > peak:
                peak, peak_index, peak_number, peak_phase = level, index - 1, number, phase_name  # type: ignore[assignment]
        elif kind == FREE:
            storage = trace.storages[number]  # type: ignore[index]
            died[number] = index  # type: ignore[index]
            index += 1
            if storage.place == "host":
                host -= sizes[number]  # type: ignore[index]
                continue
            level -= sizes[number]  # type: ignore[index]
            if number in handles:
                replay.free(handles.pop(number))  # type: ignore[arg-type]
        else:
            close_phase()
            phase_start, phase_name, phase_peak, count = index, str(number), level, count + 1
    close_phase()
    allocations = tuple(
        Allocation(sizes[n], s.kind, s.place, s.path, s.op, s.phase, born[n], died.get(n, index))
        for n, s in enumerate(trace.storages)
        if n in born
    )
    at = trace.storages[peak_number] if trace.storages else None
    reserved = max(replay.peak_reserved, peak)
    return Profile(
        origin=origin, allocations=allocations, length=index, phases=tuple(phases), peak_bytes=peak,
        peak_index=peak_index, peak_at=PeakAt(phase=peak_phase, module=at.path if at else "", op=at.op if at else ""),
        reserved_bytes=reserved,
        process_bytes=process_bytes if process_bytes is not None else reserved + device.context_bytes,
        host_peak_bytes=host_peak, step_seconds=step_seconds, assumptions=assumptions,
        uncertainty_peak=uncertainty[0], uncertainty_seconds=uncertainty[1],
    )  # fmt: skip
