"""An agent: what runs on another machine (``minato-gpu lane``) and prepares samples there for loaders that connect.

One process listens, and has no other thread. For each loader that connects it forks a session (session.py), which
meets the loader (greeting.py) and runs a normal process lane. A session ends with its connection, with the agent, and
where the loader's machine answers nothing for a minute; its workers end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing import connection
from time import perf_counter
from typing import Any

from minato_gpu.lanes.far import greeting
from minato_gpu.lanes.far.frames import FrameSocket
from minato_gpu.lanes.far.session import AgentSession
from minato_gpu.sources import cluster_token
from minato_gpu.util.threads import usable_cores

_SILENT_S = 60.0  # after which a loader is taken for gone
_MOST_SESSIONS = 256
_FORK = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1


def serve(host: str, port: int, cores: int, listening: Callable[[str], None], *, tied: bool = False) -> None:
    """Listens there until this process is ended. ``cores``: workers that a loader may have (0: one a core).
    ``listening`` is called with the address. ``tied``: it ends when standard input is closed.

    Raises ValueError where the environment has no token, OSError where the port is taken.
    """
    cluster_token.token()
    hello = greeting.own_hello(cores=cores or usable_cores())
    with socket.create_server((host, port), backlog=64) as listener:
        listening("{}:{}".format(*listener.getsockname()[:2]))
        if tied:  # nobody reads on where the address was said: workers that print would wait there for ever
            os.dup2(2, 1)
        sessions: list[Any] = []
        while True:
            ends = [each.sentinel for each in sessions]
            ready = connection.wait([listener, *ends, *([sys.stdin.fileno()] if tied else [])])
            if tied and sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 1024):
                break
            sessions = [each for each in sessions if each.exitcode is None]
            if listener in ready:
                end, _ = listener.accept()
                with end, contextlib.suppress(OSError):  # no room for a process: the loader comes again
                    if len(sessions) < _MOST_SESSIONS:
                        session = _FORK.Process(target=_session, args=(listener, end, hello, os.getpid()))
                        session.start()
                        sessions.append(session)
        for session in sessions:
            session.kill()


def _session(listener: socket.socket, end: socket.socket, hello: greeting.Hello, parent: int) -> None:
    """Serves one loader, in a process of its own, until the connection ends."""
    listener.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the agent's, which ends this process
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    with contextlib.suppress(OSError):  # whoever it was has gone, or says nothing that a loader says
        end.settimeout(greeting.LIMIT_S)
        wire = FrameSocket(end)
        if not greeting.answer(wire, hello):
            return
        end.settimeout(_SILENT_S)
        (shipment,) = wire.receive()
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * _SILENT_S))
        try:
            session = AgentSession(wire, shipment)
        except Exception as error:
            wire.send("error", f"{type(error).__name__}: {error}", perf_counter())
            end.shutdown(socket.SHUT_WR)
            while end.recv(1 << 16):  # what is closed with something unread loses what it has sent
                pass
            return
        with contextlib.closing(session):
            session.serve()
