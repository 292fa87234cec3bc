"""TCP connections of a loader and an agent: how they begin, and the frames that they carry.

Both sides prove that they know the token, then say what they are: the agent says a nonce; the loader answers with one
of its own and its code; the agent with its code (cluster_token.py). Nothing is unpickled before that. Then each says
its version and its Python.

A frame is two lengths, a pickled tuple, and bytes. Both ends refuse lengths beyond a bound. A long body is sent from
where it is stored and received into the memory that ``place`` names, without a copy between.
"""

from __future__ import annotations

import pickle
import platform
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import minato_gpu
from minato_gpu.sources.cluster_token import CODE_BYTES, NONCE_BYTES, TOKEN, code, proves
from minato_gpu.sources.peer_discovery import split_address

LIMIT_S = 5.0  # for each answer of the other side, before frames
_MAGIC = b"minato lane 3\n\0\0"
_LENGTHS = struct.Struct("<QQ")  # of head and body
_MOST_HEAD, _MOST_BODY = 1 << 34, 1 << 40
_TOGETHER = 1 << 16  # bytes of a frame that is sent by one call
_PIECE = 1 << 20  # bytes that are sent, or dropped, by one call: a socket's time limit is for each

Place = Callable[[tuple[Any, ...]], Sequence[memoryview] | None]
"""A function from a frame's head to the memory for its body; None: the body is dropped."""


class FrameSocket:
    """One end of a connection that carries frames. Any thread may send; one receives. ``received``: bytes of bodies.

    Nothing is read beyond a frame's end: a descriptor that is not readable has no frame.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.end, self.received = end, 0
        self._lock = threading.Lock()

    def send(self, *head: Any, body: Sequence[memoryview] = ()) -> None:
        """Sends a frame. If that fails the connection is shut, so that the receiving thread sees its end."""
        pickled = pickle.dumps(head, 5)
        of_body = sum(map(len, body))
        parts: list[bytes | memoryview] = [_LENGTHS.pack(len(pickled), of_body) + pickled, *body]
        with self._lock:
            try:
                for part in parts if of_body > _TOGETHER else [b"".join(parts)]:
                    view = memoryview(part)
                    for at in range(0, len(view), _PIECE):
                        self.end.sendall(view[at : at + _PIECE])
            except OSError:
                self.shut()

    def receive(self, place: Place = lambda head: None) -> tuple[Any, ...]:
        """Returns the next frame's head, once its body is stored or dropped.

        Raises OSError where the connection has ended, or a length is not what it must be.
        """
        of_head, of_body = _LENGTHS.unpack(self._filled(_LENGTHS.size))
        if of_head > _MOST_HEAD or of_body > _MOST_BODY:
            raise ConnectionError("no frame of ours is so long")
        head: tuple[Any, ...] = pickle.loads(self._filled(of_head))
        views: Iterable[memoryview] | None = place(head)
        if views is None:
            views = _nowhere(of_body)
        elif sum(map(len, views)) != of_body:
            raise ConnectionError(f"{of_body} bytes came for memory of another size")
        for view in views:
            self._fill(view)
        self.received += of_body
        return head

    def read(self, count: int) -> bytes:
        """Returns the next ``count`` bytes, outside of any frame. Raises OSError where the connection has ended."""
        return bytes(self._filled(count))

    def _filled(self, count: int) -> bytearray:
        found = bytearray(count)
        self._fill(memoryview(found))
        return found

    def _fill(self, view: memoryview) -> None:
        while len(view):
            count = self.end.recv_into(view)
            if not count:
                raise ConnectionError("the other end has closed")
            view = view[count:]

    def shut(self) -> None:
        """Ends the connection; threads that receive or send return."""
        with suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shuts and closes the socket, once no thread sends. No thread may receive any more. Idempotent."""
        self.shut()
        with self._lock:  # the descriptor's number may be another file's from now on
            self.end.close()


def _nowhere(count: int) -> Iterator[memoryview]:
    """Yields memory of so many bytes, in pieces, for what is dropped."""
    dropped = memoryview(bytearray(min(count, _PIECE)))
    for at in range(0, count, _PIECE):
        yield dropped[: count - at]


# --- how a connection begins -------------------------------------------------------------------------------------

Hello = dict[str, Any]


class AgentError(RuntimeError):
    """No agent at that address can do this loader's work; the message says why, and what to do."""


def own_hello(**more: Any) -> Hello:
    """Returns the versions of this package and of Python at this end, with ``more``."""
    major, minor, _ = platform.python_version_tuple()
    return {"version": minato_gpu.__version__, "python": f"{major}.{minor}", **more}


def reach(address: str, hold: Callable[[socket.socket], None] = lambda end: None) -> tuple[FrameSocket, Hello]:
    """Connects a loader to the agent at this address. Returns the connection, and the agent's ``own_hello``.

    ``hold`` is given the socket before it is connected.

    Raises AgentError where something else answers, OSError where nobody does.
    """
    family, _, _, _, found = socket.getaddrinfo(*split_address(address), type=socket.SOCK_STREAM)[0]
    end = socket.socket(family, socket.SOCK_STREAM)
    wire = FrameSocket(end)
    try:
        hold(end)
        end.settimeout(LIMIT_S)
        end.connect(found)
        return wire, _greet(wire, address)
    except BaseException:
        wire.close()
        raise


def _greet(wire: FrameSocket, where: str) -> Hello:
    own = secrets.token_bytes(NONCE_BYTES)
    try:
        theirs = wire.read(len(_MAGIC) + NONCE_BYTES)
        if not theirs.startswith(_MAGIC):
            said = bytes(theirs[:16])
            raise AgentError(f"{where} is no agent of minato_gpu, or one of another version: it says {said!r}")
        nonces = theirs[len(_MAGIC) :] + own
        wire.end.sendall(own + code(b"loader", nonces))
        answer = wire.read(CODE_BYTES)
    except (ConnectionError, TimeoutError) as error:
        raise AgentError(
            f"{where} answers nothing that an agent says ({error}); is that one, with the same {TOKEN}?"
        ) from error
    if not proves(answer, b"agent", nonces):
        raise AgentError(f"{where} does not know this {TOKEN}: set the same on both machines")
    mine = own_hello()
    wire.send(mine)
    (hello,) = wire.receive()
    if any(hello.get(name) != mine[name] for name in mine):
        raise AgentError(
            f"the agent at {where} is minato_gpu {hello.get('version')} on Python {hello.get('python')}, this is "
            f"minato_gpu {mine['version']} on Python {mine['python']}: install the same on both machines"
        )
    return dict(hello)


def answer(wire: FrameSocket, hello: Hello) -> bool:
    """Greets a loader, in the agent. Returns False if the loader does not know the token.

    Raises OSError where the connection ends, or the loader says nothing for ``LIMIT_S``.
    """
    own = secrets.token_bytes(NONCE_BYTES)
    wire.end.sendall(_MAGIC + own)
    theirs = wire.read(NONCE_BYTES + CODE_BYTES)
    nonces = own + theirs[:NONCE_BYTES]
    if not proves(theirs[NONCE_BYTES:], b"loader", nonces):
        wire.end.sendall(bytes(CODE_BYTES))  # so that the other end can say what is wrong
        return False
    wire.end.sendall(code(b"agent", nonces))
    wire.send(hello)
    wire.receive()  # the loader's, which compares them
    return True
