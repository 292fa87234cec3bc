"""The first exchange of a loader and an agent: both prove that they know the token, then say what they are.

The agent says a nonce; the loader answers with one of its own and its code; the agent with its code (cluster_token.py).
Nothing that comes before is more than these bytes, and nothing is unpickled. Then each says its version and its Python.
"""

from __future__ import annotations

import platform
import secrets
import socket
from collections.abc import Callable
from typing import Any

import minato_gpu
from minato_gpu.lanes.far.frames import FrameSocket
from minato_gpu.sources.cluster_token import CODE_BYTES, NONCE_BYTES, TOKEN, code, proves
from minato_gpu.sources.peer_discovery import split_address

LIMIT_S = 5.0  # for each answer
_MAGIC = b"minato lane 2\n\0\0"
_BUFFER = 1 << 16

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
    wire = FrameSocket(end, _BUFFER)
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

    Raises OSError.
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
