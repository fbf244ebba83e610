"""Memory of the machine and of this process's container: cgroups of both versions, nested ones too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")

UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


def physical_ram_bytes() -> int:
    """Memory of the whole machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def ram_limit_bytes(root: Path = ROOT) -> int:
    """Memory that this process may use: the machine's, or the lowest limit of its groups."""
    limits = (_number(group / name) for group, name, _ in _groups(root))
    return min([physical_ram_bytes(), *(limit for limit in limits if limit is not None and limit < UNLIMITED)])


def ram_free_bytes(root: Path = ROOT) -> int:
    """Memory that this process may still take. Cached files count as free: the kernel drops them when needed."""
    free = [ram_limit_bytes(root)]
    available = _fields(root / "proc/meminfo").get("MemAvailable")
    free += [available * 1024] if available is not None else []
    for group, limit_name, usage_name in _groups(root):
        limit, usage = _number(group / limit_name), _number(group / usage_name)
        if limit is not None and usage is not None and limit < UNLIMITED:
            stat = _fields(group / "memory.stat")
            cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            free.append(max(0, limit - usage + cached))
    return min(free)


def resident_bytes(pid: int, root: Path = ROOT) -> tuple[int, int] | None:
    """Resident set of a process: now, and at its peak. None when there is no such process."""
    fields = _fields(root / f"proc/{pid}/status")
    if "VmRSS" not in fields:
        return None
    return fields["VmRSS"] * 1024, fields.get("VmHWM", fields["VmRSS"]) * 1024


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """This process's memory groups, the innermost first: folder, name of the limit's file, name of the usage's file.

    In a container the path may be the host's, which does not exist there. Then the top folder is the container's group.
    """
    v1, v2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
    mounts = [("memory", "sys/fs/cgroup/memory", v1), ("", "sys/fs/cgroup", v2), ("", "sys/fs/cgroup/unified", v2)]
    paths: dict[str, str] = {}  # controller -> path of this process's group; the empty controller is version 2
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    for controller, mount, names in mounts:
        inner = Path(paths.get(controller, "/").lstrip("/"))
        for part in (inner, *inner.parents):
            folder = root / mount / part
            if (folder / names[0]).is_file():
                yield folder, *names


def _fields(path: Path) -> dict[str, int]:
    """`Name: 12 kB` or `name 12` lines as numbers."""
    columns = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {names[0]: int(names[1]) for names in columns if len(names) > 1 and names[1].isdigit()}


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
