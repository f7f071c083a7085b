"""How much memory this process may have: the machine's, its control groups', its own limits.

Every function takes ``root``, the folder that stands for ``/``, so that tests can lay out their own machine.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

_UNLIMITED_FROM = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page, about 2^63
ROOT = Path("/")


def total_bytes(root: Path = ROOT) -> int:
    """Physical memory of the machine."""
    found = _meminfo(root).get("MemTotal")
    if found is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return found


def limit_bytes(root: Path = ROOT) -> int:
    """What this process can ever have: the least of machine, control groups and resource limits."""
    limits = [total_bytes(root), *(limit for limit, _ in control_groups(root))]
    limits += [limit for limit, _ in _resource_limits(root)]
    return min(limits)


def available_bytes(root: Path = ROOT) -> int:
    """What this process could still take now without swapping or being killed."""
    free = [_meminfo(root).get("MemAvailable", total_bytes(root))]
    free += [limit - used for limit, used in control_groups(root)]
    free += [limit - used for limit, used in _resource_limits(root)]
    return max(0, min(free))


def control_groups(root: Path = ROOT) -> list[tuple[int, int]]:
    """(limit, use) in bytes of each group that limits this process, from its own up the hierarchy.

    Page cache that the kernel would give up first (``inactive_file``) is not counted as use. In a container
    the path in ``/proc/self/cgroup`` may be the host's; what exists of it is read, the mount's root always.
    """
    found: list[tuple[int, int]] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                found += _hierarchy(root / mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            found += _hierarchy(
                root / "sys/fs/cgroup/memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
    return found


def _hierarchy(mount: Path, path: str, limit: str, usage: str, inactive: str) -> list[tuple[int, int]]:
    parts = [p for p in path.split("/") if p not in ("", "..")]
    found = []
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        bound = _number(folder / limit)
        if bound is None or bound >= _UNLIMITED_FROM:
            continue
        statistics = dict(line.split(None, 1) for line in _read(folder / "memory.stat").splitlines())
        used = (_number(folder / usage) or 0) - int(statistics.get(inactive, 0))
        found.append((bound, max(0, used)))
    return found


def _resource_limits(root: Path) -> list[tuple[int, int]]:
    status = process_status(root)
    found = []
    for kind, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            found.append((soft, status.get(used, 0)))
    return found


def process_status(root: Path = ROOT) -> dict[str, int]:
    """The sizes in ``/proc/self/status`` in bytes (``VmData``, ``RssAnon``, ``VmHWM``, …)."""
    return _kilobytes(_read(root / "proc/self/status"))


def _meminfo(root: Path) -> dict[str, int]:
    return _kilobytes(_read(root / "proc/meminfo"))


def _kilobytes(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def _number(file: Path) -> int | None:
    text = _read(file).strip()
    return int(text) if text.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # no such file system, or not ours to read: that source of a limit does not apply
        return ""
