"""What chaos on disk does to a cache, and to the processes that use it."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minato_gpu.sources.disk import freeing, index


def be_killed(after: int, choose: random.Random) -> None:
    """Die at the ``after``-th of the places where a process may leave something half done."""
    left = [after]

    def now() -> bool:
        left[0] -= 1
        return left[0] == 0

    def deadly(act: Callable[..., Any]) -> Callable[..., Any]:
        def acts(*arguments: Any, **options: Any) -> Any:
            if now():
                os.kill(os.getpid(), signal.SIGKILL)
            result = act(*arguments, **options)
            if now():
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return acts

    def half(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if now():
            write(fd, [buffers[0][: choose.randint(0, len(buffers[0]))]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(fd, buffers, offset, flags)

    class Deadly:
        """A transaction before or after which the process may die."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __enter__(self) -> Any:
            return self.inner.__enter__()

        def __exit__(self, *error: object) -> Any:
            return deadly(self.inner.__exit__)(*error)

    write, begin = os.pwritev, index.Index.write
    os.pwritev = half  # type: ignore[assignment]
    for module, name in ((os, "ftruncate"), (os, "unlink"), (freeing, "punch_hole")):
        setattr(module, name, deadly(getattr(module, name)))
    index.Index.write = lambda self: Deadly(begin(self))  # type: ignore[assignment, method-assign, return-value]


def be_full(after: int, choose: random.Random) -> None:
    """From the ``after``-th write on, most writes to segments do not fit, and some in part."""
    write, count = os.pwritev, [0]

    def full(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        count[0] += 1
        if count[0] < after or choose.random() < 0.2:
            return write(fd, buffers, offset, flags)
        if len(buffers[0]) > 1 and choose.random() < 0.5:
            return write(fd, [buffers[0][: len(buffers[0]) // 2]], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.pwritev = full  # type: ignore[assignment]


def damage_between(path: Path, choose: random.Random, injected: Counter[str]) -> bool:
    """What may happen while no process has the cache open; returns whether the index was damaged."""
    for _ in range(choose.randint(0, 2)):
        damage_segment(path, choose, injected)
    index_file, act = path / "index" / "data.mdb", choose.random()
    if act < 0.15:
        _spoil(index_file, choose, choose.randint(1, 20))
        injected["index damaged"] += 1
    elif act < 0.25:
        os.truncate(index_file, choose.randrange(index_file.stat().st_size))
        injected["index shortened"] += 1
    return act < 0.25


def damage_segment(path: Path, choose: random.Random, injected: Counter[str]) -> None:
    """Spoil, shorten or delete a segment."""
    files = sorted((path / "segments").glob("*.seg")) if path.exists() else []
    if not files:
        return
    file, act = choose.choice(files), choose.choice(("damaged", "shortened", "deleted"))
    try:
        size = file.stat().st_size
        if act == "damaged" and size:
            _spoil(file, choose, choose.randint(1, 5))
        elif act == "shortened":
            os.truncate(file, choose.randint(0, size))
        elif act == "deleted":
            file.unlink()
    except FileNotFoundError:  # a process has deleted it just now
        return
    injected[f"segment {act}"] += 1


def _spoil(file: Path, choose: random.Random, places: int) -> None:
    with file.open("r+b") as opened:
        size = file.stat().st_size
        for _ in range(places):
            opened.seek(choose.randrange(size))
            opened.write(choose.randbytes(choose.choice((1, 64, 4096)))[: size - opened.tell()])
