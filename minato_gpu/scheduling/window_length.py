"""How much longer the window is than the loader's own: more batches while unlike samples leave lanes idle.

A lane is idle with a full window in two cases. Slow samples hold the window up: all else in it is ready, and the
consumer waits. Or samples cost little for a while, and the consumer is behind; where samples are unlike, costly ones
will come, and what is prepared until then is a reserve (in strict order alone: elsewhere a batch may do without them).
The window then grows by one batch at a time, while what it holds stays below a limit of bytes. It shrinks by a batch
when as many batches as it may grow by have been delivered since, or when it holds more bytes than the limit.

Simulated, two workers, strict order, of the bound (window fixed at 4 batches / growing / fixed at 32): every 16th of
64 samples takes a hundred times as long 0.575 / 1.000 / 1.000; 5 % take 40 times as long, load 105 % 0.926 / 0.967 /
0.975, load 81 % 0.979 / 0.991 / 0.991; 0.1 % take 1,000 times as long, unforeseen, 0.651 / 0.944 / 0.949. With a
lateness of 8 batches 0.978, 0.997 and 0.862 / 0.898 / 0.971: there it grows only while the consumer waits.

Rejected: a long window from the beginning; samplers are drawn far ahead, and memory is used, where all samples are
alike. To grow only while the consumer waits: 0.925 at a load of 105 %.
"""

from __future__ import annotations


class WindowLength:
    """``extra``: batches beyond the loader's own window, ``most`` at most; ``longest``: the most of them so far.
    ``limit``: bytes that the whole window may grow to hold. ``grown``: and no batch has been admitted since. ``saves``:
    samples are unlike and in strict order, so that what is prepared beyond need is a reserve. ``idled``: since the last
    delivery a lane was idle, and the window full."""

    def __init__(self, most: int, limit: int) -> None:
        self.extra = self.longest = 0
        self.most, self.limit = most, limit
        self.grown = self.saves = self.idled = False
        self._calm = 0  # batches delivered since lanes were idle last

    def out_of_work(self, waits: bool, in_flight: int, batch_bytes: float) -> None:
        """A lane is idle. The window grows where samplers are drawn next: while the consumer ``waits``, or at a
        delivery."""
        if waits:
            self.lengthen(in_flight, batch_bytes)
        else:
            self.idled = True

    def lengthen(self, in_flight: int, batch_bytes: float) -> None:
        """Lanes are idle. ``in_flight``: bytes in the window; ``batch_bytes``: expected of a batch, 0 if unknown."""
        self._calm = 0
        if not self.grown and self.extra < self.most and batch_bytes and in_flight + batch_bytes <= self.limit:
            self.extra += 1
            self.longest = max(self.longest, self.extra)
            self.grown = True

    def delivered(self, batches: int, in_flight: int) -> None:
        """So many batches have left the window, which is longer than the loader's own; ``in_flight`` bytes stay."""
        self._calm += batches
        if self._calm >= self.most or in_flight > self.limit:
            self.extra -= 1
            self._calm = 0
