"""The window's places: batches of the sampler with unready samples."""

from __future__ import annotations

from bisect import bisect_right

from minato_gpu.samples import TicketId
from minato_gpu.scheduling.messages import Admitted
from minato_gpu.scheduling.spans import BySerial, TicketSpan


class Place:
    """One batch of the sampler's order in the window."""

    __slots__ = ("admitted", "end", "epoch", "failed", "first", "missing", "number", "unfetched", "waiting")

    def __init__(self, admitted: Admitted) -> None:
        self.admitted = admitted
        self.number = admitted.place
        self.epoch = admitted.epoch
        self.first = admitted.first
        self.end = TicketId(admitted.first + admitted.size)  # after the last serial
        self.missing = admitted.size  # samples that are not ready
        self.waiting = 0  # of those, samples that wait for a lane
        self.unfetched = 0  # of those, samples whose bytes have not arrived
        self.failed: list[TicketId] = []


class Places(BySerial[Place]):
    """The incomplete places, oldest first."""

    @property
    def oldest(self) -> Place | None:
        """The oldest incomplete place."""
        return self.places[0] if self.places else None

    def finish(self, span: TicketSpan, failed: tuple[TicketId, ...] = ()) -> list[Place]:
        """Records that the samples of ``span`` are ready (``failed`` of them as errors); returns the places now
        complete."""
        lo, hi = span
        complete: list[Place] = []
        at = bisect_right(self._firsts, lo) - 1
        while lo < hi:  # as ``parts``, without a generator
            place = self.places[at]
            upto = min(hi, place.end)
            place.missing -= upto - lo
            if failed:
                place.failed.extend(serial for serial in failed if lo <= serial < upto)
            if place.missing:
                at += 1
            else:
                del self.places[at], self._firsts[at]
                complete.append(place)
            lo = upto
        return complete
