"""Samples of a worker that other loaders want, too: it sends those that it is asked for, and takes copies of
those that others have prepared (see sources/prepared_samples.py). What is not there any more it prepares itself."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter

from minato_gpu.memory import blobs
from minato_gpu.memory.arena import Arena
from minato_gpu.samples import Value
from minato_gpu.sources import sent_samples
from minato_gpu.sources.blocks import ASKED
from minato_gpu.sources.reading import AT_HAND, Place
from minato_gpu.sources.sent_samples import SentSample

Produce = Callable[[int], Value]


class Sharing:
    """Sends and copies one worker's prepared samples that loaders share.

    ``end``: the socket of the reader process; ``arena``: memory in which loaders share them. What cannot be sent is
    not shared: others then prepare it themselves.
    """

    def __init__(self, end: socket.socket, arena: Arena) -> None:
        self._end, self._arena = end, arena

    def shared(self, produce: Produce) -> Produce:
        """Returns a function that does what ``produce`` does, for the sample that AT_HAND is about: it also sends that
        sample if it is asked for, or returns another loader's copy in its place."""

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
            pieces = blobs.pieces(blobs.dump(value))
        except Exception as error:
            self._send_why_not(place, f"a sample cannot be sent: {error}")
            return value
        with suppress(OSError):
            sent_samples.send_asked(self._end, place, seconds, pieces)
        return value

    def _copy(self, produce: Produce, at: int, place: Place) -> Value:
        data, why_not = sent_samples.copy(self._arena, place), ""
        if data is not None:
            try:
                return blobs.load(data)
            except Exception as error:
                why_not = f"a copy of a sample cannot be loaded: {error}"
        self._send_why_not(place, why_not)
        return produce(at)

    def _send_why_not(self, place: Place, why_not: str) -> None:
        with suppress(OSError):
            sent_samples.send(self._end, SentSample(place[4], why_not=why_not))
