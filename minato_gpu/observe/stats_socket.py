"""The Unix socket on which a training process answers ``minato-gpu top``.

Whoever connects gets lines of JSON: one that says what this is and which process, then one for each loader. Nothing is
ever read from a connection, and another user's process gets nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from time import perf_counter

from minato_gpu.memory.private_folder import PrivateFolder, is_ours
from minato_gpu.observe.shared_service import SharedService, SocketThread, StatsProvider, StatsProviders
from minato_gpu.samples import JSON, plain
from minato_gpu.util.messages import say_once

PROTOCOL = "minato_gpu.stats.1"
"""The name of the protocol, and its version: the first message on a connection."""

_TIMEOUT_S = 1.0  # of somebody who connects and does not read


class Listener(SocketThread):
    """A socket that is named after this process's number, and its thread."""

    def __init__(self, providers: StatsProviders) -> None:
        """Raises OSError without a folder for the socket or if its name is taken, RuntimeError without a thread."""
        self._providers = providers
        with contextlib.ExitStack() as undo:
            self._folder = PrivateFolder()
            undo.callback(self._folder.close)
            self._socket = self._folder.listen(os.getpid())
            undo.callback(self._socket.close)
            undo.callback(self._folder.remove, os.getpid())
            super().__init__(self._socket.fileno(), self._tell, self._let_go, "minato-watch")
            undo.pop_all()

    def _tell(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            if is_ours(connection):
                connection.settimeout(_TIMEOUT_S)
                connection.sendall("".join(_lines(self._providers)).encode())
                with contextlib.suppress(OSError):  # a process that was forked meanwhile may have it open
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self, *, wait: bool) -> None:
        """Removes the socket's name at once, so that the next loader may take it, and ends the thread."""
        self._folder.remove(os.getpid())
        super().close(wait=wait)

    def _let_go(self) -> None:
        self._socket.close()
        self._folder.close()


def _lines(providers: StatsProviders) -> Iterator[str]:
    first: dict[str, JSON] = {"protocol": PROTOCOL, "pid": os.getpid(), "command": _command()}
    if "RANK" in os.environ:
        first["rank"] = os.environ["RANK"]
    yield _line(first)
    for name, provider in providers():
        snapshot = provider.snapshot()
        if snapshot is not None:
            yield _line({"loader": name, "epoch": snapshot.epoch, "at_s": perf_counter(), "stats": snapshot.stats})


def _line(content: dict[str, JSON]) -> str:
    return json.dumps(plain(content), allow_nan=False) + "\n"


def _command() -> str:
    """Returns this process's command line, without the interpreter."""
    return " ".join(sys.argv) or "python"


_listening = SharedService(Listener)


def watch(provider: StatsProvider) -> None:
    """Lets ``minato-gpu top`` see the loader until it is gone. If that is impossible, it is logged once."""
    try:
        _listening.add(provider)
    except (OSError, RuntimeError) as error:  # a limit of descriptors or threads, say
        say_once(f"minato-gpu top cannot watch this process: {error}")
