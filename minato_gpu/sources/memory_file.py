"""Files in memory that have no name: what is too large for a message goes along with one as a descriptor."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_AT_ONCE = 512  # buffers of one system call


@contextmanager
def memory_file(name: str, buffers: Sequence[bytes | memoryview]) -> Iterator[int]:
    """The descriptor of one that holds these bytes, one after the other; closed at the end, and gone when whoever got
    it has closed it, too. Raises OSError."""
    file = os.memfd_create(f"minato-{name}", os.MFD_CLOEXEC)
    try:
        for at in range(0, len(buffers), _AT_ONCE):
            _write(file, [memoryview(each).cast("B") for each in buffers[at : at + _AT_ONCE] if len(each)])
        yield file
    finally:
        os.close(file)


def _write(file: int, views: list[memoryview]) -> None:
    while views:
        done = os.writev(file, views)
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if views:
            views[0] = views[0][done:]


def fill(file: int, view: memoryview) -> None:
    """Copy what a file holds to a view of as many bytes."""
    at = 0
    while at < len(view):
        at += os.preadv(file, [view[at:]], at)
