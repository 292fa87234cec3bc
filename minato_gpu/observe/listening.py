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

from minato_gpu import report
from minato_gpu.notices import say_once
from minato_gpu.observe import sockets
from minato_gpu.observe.shared_service import Door, SharedService, Teller, Tellers
from minato_gpu.samples import JSON

_TIMEOUT_S = 1.0  # of somebody who connects and does not read


def listen(tellers: Tellers) -> Door:
    """A socket that tells of this process, and the thread behind it. Raises OSError where there can be none."""
    listening = sockets.listen()

    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            if sockets.is_ours(connection):
                connection.settimeout(_TIMEOUT_S)
                connection.sendall("".join(_lines(tellers)).encode())
                with contextlib.suppress(OSError):  # a process that was forked meanwhile may have it open
                    connection.shutdown(socket.SHUT_RDWR)

    return Door(listening.fileno(), answer, listening.close, "minato-watch")


def _lines(tellers: Tellers) -> Iterator[str]:
    first: dict[str, JSON] = {"protocol": sockets.PROTOCOL, "pid": os.getpid(), "command": _command()}
    if "RANK" in os.environ:
        first["rank"] = os.environ["RANK"]
    yield _line(first)
    for name, teller in tellers():
        told = teller.told()
        if told is not None:
            yield _line({"loader": name, "epoch": told.epoch, "at_s": perf_counter(), "stats": told.stats})


def _line(content: dict[str, JSON]) -> str:
    return json.dumps(report.plain(content), allow_nan=False) + "\n"


def _command() -> str:
    """As it was called, without the interpreter."""
    return " ".join(sys.argv) or "python"


_listening = SharedService(listen)


def watch(owner: object, teller: Teller) -> None:
    """Let others ask how the loader stands, until ``owner`` is gone. Where that cannot be, it is said once."""
    try:
        _listening.add(owner, teller)
    except OSError as error:
        say_once(f"minato-gpu top cannot watch this process: {error}")
