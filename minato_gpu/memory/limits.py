"""The limit of this process's memory: the machine's, or its cgroup's ``memory.max`` (a container's memory).

Shared memory of a loader is anonymous: no size of /dev/shm limits it, and it counts as the job's.
"""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def check_budget(budget: int | None) -> None:
    """Raises ValueError for a ``host_memory_budget`` in bytes beyond the limit: the kernel would kill workers."""
    limit, what = memory_limit()
    if budget is not None and budget > limit:
        raise ValueError(
            f"host_memory_budget={budget} is more than the {limit} bytes of {what}, which samples in shared memory "
            "count towards; the kernel would kill workers. Pass less, or give the job more (docker run --memory)"
        )


def memory_limit() -> tuple[int, str]:
    """Returns the least limit of this process's memory in bytes, and what limits it."""
    limits = [(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine's memory")]
    for path in _cgroup_files():
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append((int(text), f"this job's memory limit ({path.name})"))
    return min(limits)


def _cgroup_files() -> list[Path]:
    """Returns where the limits of this process's cgroup may be, versions 2 and 1; in a container its own is the
    root."""
    files = [_CGROUP / "memory.max", _CGROUP / "memory" / "memory.limit_in_bytes"]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return files
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root, name = (_CGROUP, "memory.max") if not controllers else (_CGROUP / "memory", "memory.limit_in_bytes")
            own = root / path.lstrip("/")
            files += [each / name for each in (own, *own.parents) if each.is_relative_to(root)]
    return files
