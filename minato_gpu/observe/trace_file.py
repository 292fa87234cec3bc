"""A trace in Perfetto's format: packets, each preceded by its length, appended to a file of bounded size.

The format is a protocol buffer, ``Trace`` of perfetto.dev: a file that was cut off is a trace up to there. Packets are
made by Google's own classes (the package ``perfetto``), so that they are what its viewer expects.
"""

from __future__ import annotations

import fcntl
import os
from itertools import count
from pathlib import Path
from time import CLOCK_BOOTTIME, CLOCK_MONOTONIC, CLOCK_REALTIME, clock_gettime_ns
from typing import Any

from minato_gpu.util.messages import LOGGER

BUFFERED = 1 << 16  # bytes that are written at once
_CLOCKS = {3: CLOCK_MONOTONIC, 6: CLOCK_BOOTTIME, 1: CLOCK_REALTIME}  # by Perfetto's numbers
MONOTONIC = 3
SEQUENCE = 1  # all packets are of one writer


class TraceFile:
    """A file of packets of at most ``limit`` bytes.

    If another trace is being written to ``path``, a number is added to the name. Raises OSError if it cannot be
    written.
    """

    def __init__(self, path: Path, limit: int) -> None:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket

        self._new, self._framed = TracePacket, Trace
        self._limit = limit
        self._process = os.getpid()
        self._buffer: list[bytes] = []
        self._buffered = self.nbytes = 0
        self.path, self._file = _opened(path)
        if self.path != path:
            LOGGER.warning("another trace is being written to %s; this one goes to %s", path, self.path)
        packet = self.packet()
        packet.clock_snapshot.primary_trace_clock = MONOTONIC
        for number, clock in _CLOCKS.items():
            packet.clock_snapshot.clocks.add(clock_id=number, timestamp=clock_gettime_ns(clock))
        self.write(packet)

    def packet(self, at: float | None = None) -> Any:
        """Returns a new TracePacket of this writer; ``at`` is in seconds of the monotonic clock."""
        packet = self._new(trusted_packet_sequence_id=SEQUENCE)
        if at is not None:
            packet.timestamp = int(at * 1e9)
            packet.timestamp_clock_id = MONOTONIC
        return packet

    def write(self, packet: Any) -> bool:
        """Appends the packet. Returns False if there is no room for it."""
        data = self._framed(packet=(packet,)).SerializeToString()
        if self.nbytes + len(data) > self._limit:
            return False
        self.nbytes += len(data)
        self._buffer.append(data)
        self._buffered += len(data)
        if self._buffered >= BUFFERED:
            self.flush()
        return True

    def flush(self) -> None:
        """Writes out what is buffered; does nothing in a process forked from the writer."""
        data, self._buffer, self._buffered = b"".join(self._buffer), [], 0
        if self._file < 0 or os.getpid() != self._process:
            return
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]

    def close(self) -> None:
        """Writes out what is buffered and closes the file. Idempotent."""
        if self._file >= 0:
            try:
                self.flush()
            finally:
                if os.getpid() == self._process:
                    fcntl.flock(self._file, fcntl.LOCK_UN)  # workers that still end have it open, too
                os.close(self._file)
                self._file = -1


def _opened(path: Path) -> tuple[Path, int]:
    for number in count(1):
        name = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)
            return name, file
        except BlockingIOError:
            os.close(file)
        except BaseException:
            os.close(file)
            raise
    raise AssertionError
