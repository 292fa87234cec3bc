"""``Ledger``: host bytes in flight (P4).

These are: ready samples that are not delivered; stored results of host reads and of hand-overs, until their samples are
prepared; and what running samples are expected to need.

The bytes of a sample are known once it is ready. Running ones count with the mean, or with the unused credits of their
chunks where that is more: a lease of many small samples may turn out to be a few large ones. A sample that runs up to a
hand-over also counts with what such a sample leaves there, until it is ready. Ready bytes are counted as reported, and
each delivery sets what is left: nothing is kept per sample, and the sums never drift. (Rejected: subtracting a batch's
share of the ready bytes. Where large samples followed small ones, delivered small ones were taken for large, and too
much was begun.)
"""

from __future__ import annotations

Held = tuple[int, int]
"""The numbers of samples that hold the result of a host read, and of those that hold that of a hand-over."""

NONE: Held = (0, 0)


class _Pool:
    """Samples whose inputs are stored until they are prepared; each counts with the mean."""

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
    """Byte account of one loader run. ``budget``: bytes; None for no limit."""

    def __init__(self, budget: int | None) -> None:
        self.budget = budget
        self.sample_bytes = 0.0  # mean of a ready sample; 0.0: unknown
        self.handed_bytes = 0.0  # mean of a sample that was handed over
        self.running = 0  # samples dispatched to be prepared, and neither ready nor handed over
        self.handing = 0  # running samples that will be handed over
        self.promised = 0  # unused bytes of credits
        self.ready_bytes = 0  # ready and not delivered; each delivery sets what is left
        self.ready_samples = 0  # samples that are ready and in no batch
        self._read = _Pool()
        self._handed = _Pool()  # apart: these may be a thousand times as large

    @property
    def in_flight(self) -> int:
        """Bytes ready and not delivered, stored results of host reads and hand-overs, and the expected bytes of running
        samples."""
        expected = self.running * self.sample_bytes + self.handing * self.handed_bytes
        return self.ready_bytes + self._read.nbytes + self._handed.nbytes + max(int(expected), self.promised)

    def start(self, samples: int, handing: bool = False) -> None:
        """Counts ``samples`` more as running; ``handing``: they will be handed over."""
        self.running += samples
        self.handing += samples * handing

    def stop(self, samples: int, handing: bool = False) -> None:
        """Counts ``samples`` as running no more."""
        self.start(-samples, handing)

    def read(self, samples: int, nbytes: int) -> None:
        """Counts ``nbytes`` that host reads of waiting samples hold until these are prepared."""
        self._read.add(samples, nbytes)

    def ready(self, samples: int, nbytes: int, held: Held = NONE, handing: bool = False) -> None:
        """Counts running samples as ready: they hold ``nbytes`` in all, and no longer their inputs ``held``."""
        self._drop_inputs(held)
        self.stop(samples, handing)
        self.ready_samples += samples
        self.ready_bytes += nbytes
        self.sample_bytes = _updated_mean(self.sample_bytes, samples, nbytes)

    def handed(self, samples: int, nbytes: int, held: Held = NONE, handing: bool = False) -> None:
        """Counts running samples as handed over: they hold ``nbytes`` in all, and no longer their inputs ``held``."""
        self._drop_inputs(held)
        self.stop(samples, handing)
        self._handed.add(samples, nbytes)
        self.handed_bytes = _updated_mean(self.handed_bytes, samples, nbytes)

    def _drop_inputs(self, held: Held) -> None:
        self._read.forget(held[0])
        self._handed.forget(held[1])

    def fits(self, count: int, slots: int, *, handing: bool = False, taken: int = 0, reserved: int = 0) -> int:
        """Returns how many of ``count`` further samples may be dispatched; 0 or less: none.

        While the size of a sample is unknown, it is one for each dispatch, and no more run than there are ``slots``;
        while it is unknown what a hand-over leaves, no more are handed over than that.

        Args:
            taken: samples of the same dispatch that were granted before.
            reserved: other samples that must find room as well.
            handing: they will be handed over, and each needs room for what it leaves there and for its result.
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
        """Returns how many of ``samples`` samples the whole budget has room for; all while their size is unknown."""
        if self.budget is None or not self.sample_bytes:
            return samples
        return min(samples, int(self.budget / self.sample_bytes))

    def credit(self, samples: int, *, handing: bool = False) -> int:
        """Returns the bytes of results after which a lane stops a lease of ``samples`` samples: what these are expected
        to need, so that larger ones do not add up. 0, for no limit, while nothing is known of their size."""
        return int(samples * (self.sample_bytes + self.handed_bytes * handing))


def _updated_mean(mean: float, samples: int, nbytes: int) -> float:
    """Returns a running mean after ``samples`` samples of ``nbytes`` in all."""
    weight = max(0.02, samples / (samples + 32)) if mean else 1.0
    return mean + (nbytes / samples - mean) * weight
