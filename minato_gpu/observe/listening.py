"""The socket on which a training process tells how its loaders stand, for ``minato-gpu top``.

Whoever connects is told, as lines of JSON: a first one that says what this is and which process, then one for each
loader. Nothing is ever read from a connection, and nothing is said to another user's process.
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
from minato_gpu.notices import say_once
from minato_gpu.observe.shared_service import Door, SharedService, Teller, Tellers
from minato_gpu.samples import JSON, plain

PROTOCOL = "minato_gpu.stats.1"
"""The first thing that is said on a socket: what follows."""

_TIMEOUT_S = 1.0  # of somebody who connects and does not read


class Listener(Door):
    """A socket with this process's number, and the thread behind it."""

    def __init__(self, tellers: Tellers) -> None:
        """Raises OSError where there is no folder for it, or another has its name; RuntimeError without a thread."""
        self._tellers = tellers
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
                connection.sendall("".join(_lines(self._tellers)).encode())
                with contextlib.suppress(OSError):  # a process that was forked meanwhile may have it open
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self, *, wait: bool) -> None:
        """See Door. The name is gone at once: a loader that comes next may take it."""
        self._folder.remove(os.getpid())
        super().close(wait=wait)

    def _let_go(self) -> None:
        self._socket.close()
        self._folder.close()


def _lines(tellers: Tellers) -> Iterator[str]:
    first: dict[str, JSON] = {"protocol": PROTOCOL, "pid": os.getpid(), "command": _command()}
    if "RANK" in os.environ:
        first["rank"] = os.environ["RANK"]
    yield _line(first)
    for name, teller in tellers():
        told = teller.told()
        if told is not None:
            yield _line({"loader": name, "epoch": told.epoch, "at_s": perf_counter(), "stats": told.stats})


def _line(content: dict[str, JSON]) -> str:
    return json.dumps(plain(content), allow_nan=False) + "\n"


def _command() -> str:
    """As it was called, without the interpreter."""
    return " ".join(sys.argv) or "python"


_listening = SharedService(Listener)


def watch(teller: Teller) -> None:
    """Let others ask how the loader stands, until it is gone. Where that cannot be, it is said once."""
    try:
        _listening.add(teller)
    except (OSError, RuntimeError) as error:  # a limit of descriptors or threads, say
        say_once(f"minato-gpu top cannot watch this process: {error}")
