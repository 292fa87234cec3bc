"""The sockets by which processes of one user find each other.

They have Linux's abstract names, which lie in no folder: a name goes with the process that listens, however that ends,
so that nothing stays behind, and no path has to be trusted. Anybody on the machine may read them, connect, and make
others that look alike: so each end asks the kernel whose process the other one is, before anything is said. Each name
ends with something that nobody can foresee, so that none is taken before its owner comes.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from pathlib import Path
from uuid import uuid4

PROTOCOL = "minato_gpu.stats.1"
"""The first thing that is said on a socket: what follows."""

_NAME = "minato-gpu"
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def listen() -> socket.socket:
    """A socket that tells of this process."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(f"\0{_NAME}-{os.getuid()}-{os.getpid()}-{uuid4().hex}")
    listening.listen()
    return listening


def found() -> list[tuple[int, str]]:
    """The processes that say they are this user's and listen, with their sockets' names. Raises OSError."""
    names = Path("/proc/net/unix").read_text(errors="replace")
    told = re.findall(rf" @({_NAME}-{os.getuid()}-([0-9]+)-\w+)$", names, re.MULTILINE)
    return sorted({(int(pid), name) for name, pid in told})


def connect(name: str, timeout: float) -> socket.socket:
    """A connection to the socket of this name. Raises OSError; PermissionError where another user's has answered."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(f"\0{name}")
        if not is_ours(connection):
            raise PermissionError(f"the socket {name} is another user's")
    except BaseException:
        connection.close()
        raise
    return connection


def is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end is of the same user, as the kernel says."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1]) == os.getuid()
