"""A loader's side of a reader process that loaders of a host share (host_reader.py), which it finds or starts.

Whoever looks for it holds the lock of the user's private folder: so only one starts it, and none connects to one that
is about to end. A loader that can neither reach nor start it reads by a process of its own, as without ``share``.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from minato_gpu.memory.arena import Arena
from minato_gpu.memory.private_folder import PrivateFolder
from minato_gpu.sources import host_reader, sent_samples
from minato_gpu.sources.host_reader import LARGEST, Answer
from minato_gpu.sources.messages import SOCKET_BYTES
from minato_gpu.sources.process import ReaderSettings
from minato_gpu.sources.reader import Reader, arena_of
from minato_gpu.sources.service import Ready
from minato_gpu.util import children
from minato_gpu.util.messages import LOGGER, say_once

_PATIENCE_S = 10.0  # with one that has just been started, by a fork server perhaps, or is stopped
_SILENT = (
    f"its reader process has not answered for {_PATIENCE_S:.0f} s. If it is stopped (ps shows state T), continue it "
    "with kill -CONT, or kill it: the next loader starts another"
)
_ROOM = 1 << 16  # bytes of a socket's buffer: some hundred samples, of which as many are under way
_KIND = socket.SOCK_SEQPACKET


class SharedReader(Reader):
    """A connection to the reader process called ``share``, which ``start`` starts if there is none.

    Raises OSError if it can neither be reached nor started, or does not answer. ``stays``: see ``Reader``.
    """

    def __init__(self, start: Callable[..., Any], share: str, settings: ReaderSettings, *, stays: bool) -> None:
        self._share, self._stays_open, self._is_closed = share, stays, False
        end = _connected(start, share, settings)
        theirs, ours = sent_samples.pair(_ROOM) if settings.share_bytes else (None, None)
        try:
            answer, arena, of_samples = _welcomed(end, settings, theirs)
        except BaseException:
            for each in (end, ours):
                if each is not None:
                    each.close()
            raise
        finally:
            if theirs is not None:
                theirs.close()
        self.pid = answer.pid
        self._hold(end, arena, settings, stays=True)
        self.prepared = None if ours is None or of_samples is None else (ours, of_samples)
        if self.prepared is None:
            for unused in (ours, of_samples):
                if unused is not None:
                    unused.close()
        self._compare(answer)

    def _compare(self, found: Answer) -> None:
        """Logs settings of this loader that have no effect, as another loader has started the process with its own."""
        settings = self.settings
        ours, theirs = settings.peers[1:] or settings.peers, found.peers[1:] or found.peers
        for name, own, said in (
            ("cache", settings.memory_bytes or found.memory_bytes, found.memory_bytes),
            ("share_budget", settings.share_bytes or found.share_bytes, found.share_bytes),
            ("cache_peers", ", ".join(ours) or "no other host", ", ".join(theirs) or "no other host"),
        ):
            if own != said:
                say_once(
                    f"share={self._share!r}: {name} is {said}, as the loader said that came first; that of this "
                    f"loader ({own}) counts for nothing: give all loaders of a share the same"
                )

    def _heard(self) -> list[list[Ready]] | None:
        heard = super()._heard()
        if (shared := self.counts.get("share")) and shared["why_not"]:
            say_once(f"share={self._share!r}: prepared samples are not shared any more: {shared['why_not']}")
        return heard

    @property
    def is_open(self) -> bool:
        """True if it has not been closed, and belongs to this process, not to its parent."""
        return not self._is_closed and os.getpid() == self._owner

    @property
    def runs(self) -> bool:
        """True if the process still runs. Takes in what it has sent, so it is asked only while nobody has borrowed
        it."""
        return self.is_open and self._heard() is not None

    def say_lost(self) -> None:
        """Logs that the process has ended, and what follows from it."""
        LOGGER.warning(
            "The reader process of share=%r (pid %d) has ended. Workers read from storage themselves until workers are "
            "started anew, which start another; nothing is lost.",
            self._share,
            self.pid,
        )

    def give_back(self) -> None:
        """Notes that the workers have ended: the process drops what it was to read for this loader. ``counts`` are
        complete then. Closes the connection unless it ``stays``."""
        super().give_back()
        if not self._stays_open:
            self.close()

    def close(self) -> None:
        """Disconnects; other loaders go on. Idempotent, and of no effect in a forked process."""
        if self.is_open:
            self._is_closed = True
            self.end.close()
            self.arena.close()
            for each in self.prepared or ():
                each.close()


def open_reader(start: Callable[..., Any], share: str, settings: ReaderSettings, *, stays: bool) -> Reader:
    """Returns the reader process called ``share``, or one of the loader's own.

    The loader gets its own if ``share`` is "", or the shared one cannot be used.
    """
    if share:
        try:
            return SharedReader(start, share, settings, stays=stays)
        except OSError as error:
            why = str(error)  # whoever keeps the record is not to keep the frames
            LOGGER.warning("share=%r: this loader reads by a process of its own: %s", share, why)
    return Reader(start, settings, stays=stays)


def _connected(start: Callable[..., Any], share: str, settings: ReaderSettings) -> socket.socket:
    """Returns a connection to the process, which is started if there is none."""
    folder, name = PrivateFolder(), host_reader.name_of(share)
    try:
        with folder.locked(_PATIENCE_S):
            try:
                return folder.connect(name, _PATIENCE_S, _KIND)
            except (FileNotFoundError, ConnectionRefusedError):  # one that was killed has left its name
                folder.remove(name)
            listening = folder.bind(name, _KIND)
            try:
                _start(start, listening, share, settings)
            finally:
                listening.close()
            return folder.connect(name, _PATIENCE_S, _KIND)
    finally:
        folder.close()


def _start(start: Callable[..., Any], listening: socket.socket, share: str, settings: ReaderSettings) -> None:
    """Starts the process by way of one that ends at once, so that it is no child of this process."""
    with ExitStack() as undo:
        arenas = [arena_of(settings.memory_bytes), arena_of(settings.share_bytes) if settings.share_bytes else None]
        for arena in arenas:
            if arena is not None:
                undo.callback(arena.close)
        starter = start(host_reader.main, *arenas, listening, share, settings)
        starter.join()
        children.close(starter)


def _welcomed(
    end: socket.socket, settings: ReaderSettings, of_samples: socket.socket | None
) -> tuple[Answer, Arena, Arena | None]:
    """Sends the settings and the workers' socket of prepared samples.

    Returns the answer, the arena, and that of prepared samples. Raises OSError.
    """
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    files = [] if of_samples is None else [of_samples.fileno()]
    socket.send_fds(end, [pickle.dumps(settings, 5)], files)
    try:
        said, files, _, _ = socket.recv_fds(end, LARGEST, 2, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        raise TimeoutError(_SILENT) from None
    try:
        if not said:
            raise ConnectionError("its reader process has ended")
        answer: Answer = pickle.loads(said)
        if len(files) < 1 + (answer.share_bytes > 0):
            raise OSError(errno.EMFILE, "no descriptor is free for its memory; raise the limit (ulimit -n)")
        shared = Arena("samples", answer.samples_capacity, fd=files.pop()) if answer.share_bytes else None
        return answer, Arena("kept", answer.capacity, fd=files.pop()), shared
    finally:
        for file in files:
            os.close(file)
