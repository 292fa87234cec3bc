"""How a loader and an agent meet: both prove that they know the token, then say what they are.

The agent says a nonce; the loader answers with one of its own and its code; the agent with its code (cluster_token.py).
Nothing that comes before is more than these bytes. Then each says in a line of JSON its version and its Python.
"""

from __future__ import annotations

import json
import platform
import secrets
import socket
from typing import Any

import minato_gpu
from minato_gpu.sources.cluster_token import CODE_BYTES, NONCE_BYTES, TOKEN, code, proves

LIMIT_S = 5.0  # for each answer
_MAGIC = b"minato lane 1\n\0\0"
_LONGEST_LINE = 4096

Hello = dict[str, Any]


class AgentError(RuntimeError):
    """There is no agent at that address that can do this loader's work; why, and what to do."""


def own_hello(**more: Any) -> Hello:
    """What this end is."""
    major, minor, _ = platform.python_version_tuple()
    return {"version": minato_gpu.__version__, "python": f"{major}.{minor}", **more}


def greet(end: socket.socket, where: str) -> Hello:
    """In the loader: what the agent at the other end is. Raises AgentError or OSError."""
    end.settimeout(LIMIT_S)
    own = secrets.token_bytes(NONCE_BYTES)
    try:
        theirs = _exactly(end, len(_MAGIC) + NONCE_BYTES)
        if not theirs.startswith(_MAGIC):
            raise AgentError(f"{where} is no agent of minato_gpu, or one of another version: it says {theirs[:16]!r}")
        nonces = theirs[len(_MAGIC) :] + own
        end.sendall(own + code(b"loader", nonces))
        answer = _exactly(end, CODE_BYTES)
    except (ConnectionError, TimeoutError) as error:
        raise AgentError(
            f"{where} answers nothing that an agent says ({error}); is that one, with the same {TOKEN}?"
        ) from error
    if not proves(answer, b"agent", nonces):
        raise AgentError(f"{where} does not know this {TOKEN}: set the same on both machines")
    _say(end, own_hello())
    hello = _line(end)
    mine = own_hello()
    if any(hello.get(name) != mine[name] for name in mine):
        raise AgentError(
            f"the agent at {where} is minato_gpu {hello.get('version')} on Python {hello.get('python')}, this is "
            f"minato_gpu {mine['version']} on Python {mine['python']}: install the same on both machines"
        )
    return hello


def answer(end: socket.socket, hello: Hello) -> Hello | None:
    """In the agent: what the loader at the other end is; None where it does not know the token. Raises OSError."""
    end.settimeout(LIMIT_S)
    own = secrets.token_bytes(NONCE_BYTES)
    end.sendall(_MAGIC + own)
    theirs = _exactly(end, NONCE_BYTES + CODE_BYTES)
    nonces = own + theirs[:NONCE_BYTES]
    if not proves(theirs[NONCE_BYTES:], b"loader", nonces):
        end.sendall(bytes(CODE_BYTES))  # so that the other end can say what is wrong
        return None
    end.sendall(code(b"agent", nonces))
    _say(end, hello)
    return _line(end)


def _exactly(end: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = end.recv(count - len(found))
        if not more:
            raise ConnectionError("it has closed the connection")
        found += more
    return found


def _say(end: socket.socket, hello: Hello) -> None:
    end.sendall(json.dumps(hello).encode().ljust(_LONGEST_LINE))


def _line(end: socket.socket) -> Hello:
    try:
        hello: Hello = dict(json.loads(_exactly(end, _LONGEST_LINE)))
    except (ValueError, TypeError) as error:
        raise ConnectionError("no greeting") from error
    return hello
