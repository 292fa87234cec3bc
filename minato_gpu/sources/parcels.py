"""Messages of any size through a socket that keeps them apart.

A message is taken whole or not at all, and how large it may be is the kernel's to say (some 200 KB, unless told
otherwise). What is larger goes along as a file in memory, which is gone once it has been read.
"""

from __future__ import annotations

import os
import socket

from minato_gpu.sources.memory_file import fill, memory_file

LARGEST = 64 << 10  # bytes of a message that goes as it is
_ELSEWHERE = b"\0"  # a message of this alone says that it is in a file


def send(end: socket.socket, data: bytes) -> None:
    """Send a message that is not empty and not ``_ELSEWHERE``. Raises BlockingIOError where there is no room yet, and
    OSError."""
    if len(data) <= LARGEST:
        end.send(data)
        return
    with memory_file("message", [data]) as file:
        socket.send_fds(end, [_ELSEWHERE], [file])


def receive(end: socket.socket) -> bytes:
    """The next message; empty once the other end has been closed. Raises BlockingIOError where nothing has come, and
    OSError."""
    data, files, _, _ = socket.recv_fds(end, LARGEST, 1, socket.MSG_CMSG_CLOEXEC)
    if data != _ELSEWHERE:
        return data
    if not files:
        raise OSError("no descriptor was free for a message")
    try:
        whole = bytearray(os.fstat(files[0]).st_size)
        fill(files[0], memoryview(whole))
    finally:
        os.close(files[0])
    return bytes(whole)
