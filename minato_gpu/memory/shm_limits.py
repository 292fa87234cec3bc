"""Checks as a loader is made, not when a worker is killed for it, whether there is room for shared memory.

This loader puts its own data into anonymous memory, which no size of /dev/shm limits. It counts as the job's, so what
limits it is the cgroup's ``memory.max`` (a container's memory) and the machine's. ``/dev/shm`` is used all the same
where a worker runs PyTorch's ``default_collate``: by itself for samples that cannot be stacked in place, or from a
user's ``collate_fn``. PyTorch makes its tensors there, one batch in each worker at a time, before they are copied on.
"""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path

from torch.utils.data import default_collate

from minato_gpu.arguments import Arguments
from minato_gpu.memory.address_space import LEAST
from minato_gpu.util.messages import say_once

_TMPFS = Path("/dev/shm")
_CGROUP = Path("/sys/fs/cgroup")
_LEAST = 16 << 20  # bytes in /dev/shm for each worker that may collate there; containers have 64 MiB in all by default

SHORT = (
    "The kernel had no memory left for its shared memory: the container's memory limit or the machine's is reached, "
    "or, where default_collate runs in a worker, /dev/shm is full (docker run --shm-size)."
)


def check(loader: Arguments, *, processes: bool) -> None:
    """Warns of limits that are too small.

    Raises ValueError or RuntimeError if the loader cannot work, with what to do.
    """
    _check_budget(loader.host_memory_budget)
    _check_mapping()
    collates = loader.collate_fn is not default_collate and loader.batch_sampler is not None
    if processes and collates:
        _look_at_tmpfs(loader.num_workers)


def _check_budget(budget: int | None) -> None:
    limit, what = memory_limit()
    if budget is not None and budget > limit:
        raise ValueError(
            f"host_memory_budget={budget} is more than the {limit} bytes of {what}, which samples in shared memory "
            "count towards; the kernel would kill workers. Pass less, or give the job more (docker run --memory)"
        )


def _check_mapping() -> None:
    try:
        fd = os.memfd_create("minato-try", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, LEAST)
            mmap.mmap(fd, LEAST).close()
        finally:
            os.close(fd)
    except OSError as error:
        raise RuntimeError(
            f"this process cannot map {LEAST >> 20} MiB of shared memory ({error}); look at its limits for address "
            "space and file size (ulimit -v, ulimit -f), or pass worker_kind='thread' or num_workers=0"
        ) from error


def _look_at_tmpfs(workers: int) -> None:
    try:
        free = shutil.disk_usage(_TMPFS).free
    except OSError:
        free = 0
    if free < workers * _LEAST:
        say_once(
            f"/dev/shm has {free >> 20} MiB left for {workers} workers. Where collate_fn calls default_collate, "
            "PyTorch makes each worker's batch there, and a worker that finds no room is killed (bus error). Enlarge "
            "it (docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm), or make tensors with "
            "minato_gpu.shared_empty"
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
