"""Host bytes in flight: what is ready and not delivered, and what the running samples are expected to need (P4).

What a sample will need is only known once it is ready, so running ones count with the mean, or with what their lanes
may still prepare without asking (the credits of their chunks), where that is more: a lease of many small samples may
turn out to be one of a few large ones. One that runs only as far as a hand-over counts with what such a sample leaves
there as well: it holds that until it is ready, while another lane goes on with it. What is ready is counted as it is
reported, and each delivery tells what is left of it: nothing is kept per sample, and the sums never drift.
(Rejected: a batch's share of what is ready. Where large samples follow small
ones, delivered small ones were taken for large, and as much too much was begun.)
"""

from __future__ import annotations

Held = tuple[int, int]
"""Of some samples, how many hold what the host read has left, and how many what they were handed over with."""

NONE: Held = (0, 0)


class _Pool:
    """Samples that hold something until they are prepared; each counts with its share."""

    __slots__ = ("nbytes", "samples")

    def __init__(self) -> None:
        self.nbytes = self.samples = 0

    def add(self, samples: int, nbytes: int) -> None:
        self.samples += samples
        self.nbytes += nbytes

    def forget(self, samples: int) -> None:
        if samples:
            self.nbytes -= self.nbytes * samples // self.samples
            self.samples -= samples


class Ledger:
    """Byte account of one loader run. ``budget``: bytes, or None for no limit."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.sample_bytes = 0.0
        self.handed_bytes = 0.0  # of a sample that was handed over
        self.running = 0  # samples dispatched and not ready
        self.handing = 0  # those of them that are to be handed over
        self.promised = 0  # bytes of credits that are not used up
        self._ready_bytes = 0
        self.pool = 0  # samples that are ready and in no batch
        self._read = _Pool()
        self._handed = _Pool()  # apart: what was handed over may be a thousand times as large as what was read

    @property
    def in_flight(self) -> int:
        """Bytes ready and not delivered, plus the expected bytes of what runs."""
        expected = self.running * self.sample_bytes + self.handing * self.handed_bytes
        return self._ready_bytes + self._read.nbytes + self._handed.nbytes + max(int(expected), self.promised)

    def start(self, samples: int, handing: bool = False) -> None:
        """``samples`` more run; ``handing``: they are to be handed over."""
        self.running += samples
        self.handing += samples * handing

    def stop(self, samples: int, handing: bool = False) -> None:
        """``samples`` of them run no more."""
        self.start(-samples, handing)

    def read(self, samples: int, nbytes: int) -> None:
        """What the host read of ``samples`` waiting ones holds ``nbytes`` until they are prepared."""
        self._read.add(samples, nbytes)

    def ready(self, samples: int, nbytes: int, held: Held = NONE, handing: bool = False) -> None:
        """``samples`` running ones became ready and hold ``nbytes`` together, and no longer what they ``held``."""
        self._forget(held)
        self.stop(samples, handing)
        self.pool += samples
        self._ready_bytes += nbytes
        self.sample_bytes = _nearer(self.sample_bytes, samples, nbytes)

    def handed(self, samples: int, nbytes: int, held: Held = NONE, handing: bool = False) -> None:
        """``samples`` running ones wait again for another lane, and hold ``nbytes`` instead of what they ``held``."""
        self._forget(held)
        self.stop(samples, handing)
        self._handed.add(samples, nbytes)
        self.handed_bytes = _nearer(self.handed_bytes, samples, nbytes)

    def _forget(self, held: Held) -> None:
        self._read.forget(held[0])
        self._handed.forget(held[1])

    def deliver(self, left: int) -> None:
        """A batch belongs to the consumer; what is ready and not delivered comes to ``left`` bytes."""
        self._ready_bytes = left

    def fits(self, count: int, slots: int, *, handing: bool = False, taken: int = 0, reserved: int = 0) -> int:
        """How many of ``count`` further samples may be dispatched; at least one slot's worth until sizes are known.

        ``taken`` of the same kind have been taken already, and ``reserved`` others must find room as well. ``handing``:
        they are to be handed over, and each needs room for what it leaves there and for what becomes of it.
        """
        if self.budget is None:
            return count
        if self.sample_bytes == 0:
            return min(count, 1 - taken, max(0, slots - self.running) - taken - reserved)  # one to each slot
        if handing and self.handed_bytes == 0:
            count = min(count, max(0, slots - self.handing) - taken)
        each = self.sample_bytes + self.handed_bytes * handing
        free = self.budget - self.in_flight - taken * each - reserved * self.sample_bytes
        return min(count, max(0, int(free / each)))

    def within(self, samples: int) -> int:
        """How many of so many samples the budget has room for, all of it."""
        if self.budget is None or not self.sample_bytes:
            return samples
        return min(samples, int(self.budget / self.sample_bytes))

    def credit(self, samples: int, *, handing: bool = False) -> int:
        """The bytes that so many running samples count with. Their lane is to stop there, so that samples that are
        larger than the mean do not add up."""
        return int(samples * (self.sample_bytes + self.handed_bytes * handing))


def _nearer(mean: float, samples: int, nbytes: int) -> float:
    """A running mean after ``samples`` samples with ``nbytes`` together."""
    weight = max(0.02, samples / (samples + 32)) if mean else 1.0
    return mean + (nbytes / samples - mean) * weight
