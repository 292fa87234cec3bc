"""The loader's side of its reader process (process.py): started, told what is wanted, and heard."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

from minato_gpu import children
from minato_gpu.notices import LOGGER
from minato_gpu.sources.memory_tier import Begun
from minato_gpu.sources.parcels import Parcels
from minato_gpu.sources.service import Told
from minato_gpu.sources.unsaid import Unsaid

_ROOM = 2 << 20  # bytes of a socket's buffer, if the kernel allows so many
_LEAVE_S = 10.0  # what is to be kept may have to be written yet
NO_RUN = -1


class Reader:
    """``start`` starts the process with its end of the socket, and returns it; ``ends`` is given this side's end, which
    no process that is forked may keep open. ``counts``: what the process has told of its work last."""

    def __init__(self, start: Callable[[socket.socket], Any], ends: list[Any]) -> None:
        self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (self.end, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        self._parcels = Parcels(self.end)
        ends.append(self.end)
        self.counts: dict[str, Any] = {}
        with theirs:
            self.process = start(theirs)

    def begin(self, run: int, begun: Begun) -> None:
        """An epoch begins: what is wanted from now on is wanted by that."""
        self._say("begin", run, begun)

    def say(self, run: int, unsaid: Unsaid) -> None:
        """Say what is wanted and what is released; a new ``run`` makes it forget the one before."""
        self._say("say", run, unsaid.take())

    def _say(self, kind: str, run: int, what: Any) -> None:
        self._parcels.put((kind, run, what))
        self._flush()

    def _flush(self) -> None:
        """What there is no room for is sent once it has said something."""
        with contextlib.suppress(OSError):  # it has ended, which ``receive`` finds out
            self._parcels.flush()

    def receive(self, run: int) -> list[Told] | None:
        """What has been told of this run since the last call; None once the process has ended."""
        try:
            found = self._parcels.receive()
        except OSError:
            return None
        told: list[Told] = []
        for of, some, counts in found:
            self.counts |= counts
            if of == run:
                told += some
        self._flush()
        return told

    def say_lost(self) -> None:
        """Log that the process has ended, and what follows from it."""
        self.process.join(_LEAVE_S)
        LOGGER.warning(
            "The process that reads ahead (pid %d) has ended with %s. Workers read from storage themselves "
            "until workers are started anew; nothing is lost.",
            self.process.pid,
            children.in_words(children.exit_code(self.process, self.process.sentinel)),
        )

    def close(self) -> None:
        """End the process, and hear what it has to say last. Idempotent."""
        if self.process is None:
            return
        process, self.process = self.process, None
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_WR)
        process.join(_LEAVE_S)
        if children.exit_code(process, process.sentinel) is None:
            process.kill()
            process.join()
        children.close(process)
        self.receive(NO_RUN)
        self.end.close()
