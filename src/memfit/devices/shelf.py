"""The catalogue of devices as data: ``catalogue/*.toml`` read into :class:`memfit.core.device.Device`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TypeVar

import msgspec

from memfit.core.device import Device
from memfit.core.errors import BadInput
from memfit.core.units import parse_bytes

FOLDER = Path(__file__).parent / "catalogue"
ASSUMPTIONS = "assumptions.toml"
T = TypeVar("T")


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of a catalogue file; the units are those of :class:`Device`.

    Attributes:
        memory: capacity as the driver reports it, with its unit (``"23.6GiB"``).
        aliases: other names under which a user may ask for the device.
        unverified: keys (or ``flops.<dtype>``) whose figure has no source that was read.
    """

    title: str
    architecture: str
    memory: str
    bandwidth: float
    flops: dict[str, float]
    host_link: float
    multiprocessors: int
    sources: tuple[str, ...]
    kind: str = "cuda"
    vendor: str = "NVIDIA"
    aliases: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()


class Assumptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``assumptions.toml``: context bytes by architecture, efficiency by kind and op class."""

    context_bytes: dict[str, int]
    efficiency: dict[str, dict[str, float]]


def read_entries(file: Path) -> dict[str, Entry]:
    """The entries of one catalogue file by device name.

    Raises:
        BadInput: an unknown key, a missing one or a value of the wrong type; names the file and the key.
    """
    return _decode(file, dict[str, Entry])


@functools.cache
def assumptions() -> Assumptions:
    return _decode(FOLDER / ASSUMPTIONS, Assumptions)


@functools.cache
def entries() -> dict[str, Entry]:
    """Every entry of the catalogue by name, in the order of files and of tables in them."""
    found: dict[str, Entry] = {}
    for file in sorted(FOLDER.glob("*.toml")):
        if file.name != ASSUMPTIONS:
            found.update(read_entries(file))
    return found


@functools.cache
def devices() -> dict[str, Device]:
    """Every device of the catalogue by name."""
    assumed = assumptions()
    return {
        name: Device(
            name=name,
            kind=entry.kind,
            architecture=entry.architecture,
            memory_bytes=parse_bytes(entry.memory, key=f"{name}.memory"),
            bandwidth=entry.bandwidth,
            flops=entry.flops,
            host_link=entry.host_link,
            multiprocessors=entry.multiprocessors,
            context_bytes=assumed.context_bytes[entry.architecture],
            title=entry.title,
            vendor=entry.vendor,
            efficiency=assumed.efficiency[entry.kind],
            sources=entry.sources,
        )
        for name, entry in entries().items()
    }


@functools.cache
def aliases() -> dict[str, str]:
    """The catalogue name for every alias."""
    return {alias: name for name, entry in entries().items() for alias in entry.aliases}


def _decode(file: Path, kind: type[T]) -> T:
    try:
        return msgspec.toml.decode(file.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise BadInput("device.catalogue", file=str(file), reason=str(error)) from error
