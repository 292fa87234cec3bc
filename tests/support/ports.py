"""A port for a server that has to be told which."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_free(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that the kernel gives to nobody meanwhile, and that a server may have which names it."""
    with socket.socket() as keeps:
        keeps.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do; it never listens
        keeps.bind((host, 0))
        yield int(keeps.getsockname()[1])
