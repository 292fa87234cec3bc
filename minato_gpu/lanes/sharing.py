"""How a worker prepares samples that other loaders want, too: it sends those that it is asked for, and takes copies of
those that others have prepared (see sources/prepared_samples.py). What is not there any more it prepares itself."""

from __future__ import annotations

import socket
from collections.abc import Callable
from time import perf_counter

from minato_gpu.memory import blobs
from minato_gpu.samples import Value
from minato_gpu.sources import fields
from minato_gpu.sources.blocks import ASKED
from minato_gpu.sources.reading import AT_HAND, Place

Produce = Callable[[int], Value]


class Sharing:
    """Sends samples, and takes copies, for one worker. ``end``: the socket of the reader process."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def shared(self, produce: Produce) -> Produce:
        """Returns the way to have the sample that AT_HAND is about: by a copy, if there is one."""

        def produced(at: int) -> Value:
            place = AT_HAND.prepared
            if place is None:
                return produce(at)
            if place[0] == ASKED:
                return self._prepare(produce, at, place)
            return self._copy(produce, at, place)

        return produced

    def _prepare(self, produce: Produce, at: int, place: Place) -> Value:
        begin = perf_counter()
        value = produce(at)
        seconds = perf_counter() - begin
        try:
            buffers, why_not = blobs.pieces(blobs.dump(value)), ""
        except Exception as error:
            buffers, why_not = None, f"a sample cannot be sent: {error}"
        fields.send(self._end, place[4], buffers, 0.0, seconds, why_not)
        return value

    def _copy(self, produce: Produce, at: int, place: Place) -> Value:
        data, why_not = AT_HAND.find_prepared(), ""
        if data is not None and place[5] is None:
            try:
                return blobs.load(data)
            except Exception as error:
                why_not = f"a copy of a sample cannot be loaded: {error}"
        value = produce(at)
        if data is not None and not why_not:
            if _same(value, data.tobytes()):
                return value
            why_not = "a sample that two loaders have prepared is not the same, bit for bit"
        fields.send(self._end, place[4], None, 0.0, 0.0, why_not)
        return value


def _same(value: Value, data: bytes) -> bool:
    try:
        return b"".join(blobs.pieces(blobs.dump(value))) == data
    except Exception:
        return False
