"""What a job runs on: the catalogue, this machine, its calibration, and models of allocators.

Nothing here imports torch at import; :func:`this_machine` does so only where a driver is present, and
:mod:`memfit.devices.calibration` measures in a child process.
"""

from __future__ import annotations

from memfit.core.device import Device
from memfit.core.errors import BadInput
from memfit.devices import shelf

__all__ = ["get_device", "names", "table", "this_machine"]


def names() -> list[str]:
    """The names that :func:`get_device` knows, without aliases: the catalogue's, ``"cpu"`` and ``"auto"``."""
    return [*shelf.devices(), "cpu", "auto"]


def get_device(name: str) -> Device:
    """The device of that name or alias; ``"auto"`` is this machine's card, or its CPU where it has none.

    ``"cpu"`` is calibrated at its first use (some seconds, once per machine; see
    :func:`memfit.devices.calibration.is_calibrated`), unless ``MEMFIT_NO_CALIBRATION=1`` or torch is missing.

    Raises:
        BadInput: no such device; names the valid ones and the nearest.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    if wanted == "auto":
        return this_machine()
    if wanted == "cpu":
        from memfit.devices import cpu

        return cpu.device()
    known = shelf.devices()
    wanted = shelf.aliases().get(wanted, wanted)
    if wanted in known:
        return known[wanted]
    import difflib

    choices = names()
    near = difflib.get_close_matches(wanted, [*choices, *shelf.aliases()], n=1)
    figures = {"setting": "budget.device", "value": name, "choices": ", ".join(choices)}
    if near:
        raise BadInput("input.unknown_name_near", near=shelf.aliases().get(near[0], near[0]), **figures)
    raise BadInput("input.unknown_name", **figures)


def table() -> list[Device]:
    """Every device of the catalogue, and this machine's CPU as far as it has been measured."""
    from memfit.devices import cpu

    return [*shelf.devices().values(), cpu.device(measure=False)]


def this_machine() -> Device:
    """This machine's first CUDA or ROCm card, or its CPU where torch can use none."""
    from memfit.devices import cpu, detect

    return detect.card() or cpu.device()
