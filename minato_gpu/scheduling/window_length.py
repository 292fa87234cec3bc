"""``WindowLength``: lengthens the window by further batches while lanes are idle because costs vary.

A lane is idle with a full window in two cases. Slow samples hold the window up: all else in it is ready, and the
consumer waits. Or samples are cheap for a while and the consumer is behind; where costs vary, costly samples will come,
and what is prepared until then is a reserve (only in strict order: out of order a batch may do without them). The
window then grows by one batch at a time while its bytes stay below a limit. It shrinks by one when as many batches as
it may grow by were delivered without idling, or when it exceeds the limit.

Simulated, two workers, strict order, relative to the bound (window fixed at 4 batches / growing / fixed at 32): every
16th of 64 samples takes 100 times as long 0.575 / 1.000 / 1.000; 5 % take 40 times as long, load 105 % 0.926 / 0.967 /
0.975, load 81 % 0.979 / 0.991 / 0.991; 0.1 % take 1,000 times as long, unforeseen, 0.651 / 0.944 / 0.949. With a
lateness of 8 batches 0.978, 0.997 and 0.862 / 0.898 / 0.971: there it grows only while the consumer waits.

In strict order it also grows where a whole batch is little work (``Policy.group_s``). Then ``together`` batches are
admitted at once, so that one dispatch, one wake-up and one report serve several batches; the window holds two such
groups for each worker. A window that may not grow is used for it as it is. Measured, text, two workers on two cores:
batches of 5 ms, 8 % more samples/s; of 13 ms, 3 %. (Groups of 20 ms: 7 and 0 %; of 160 ms: no more.)

Rejected: a long window from the start, which draws samplers far ahead and uses memory where all samples are alike.
Growing only while the consumer waits: 0.925 at a load of 105 %.
"""

from __future__ import annotations

_MOST_TOGETHER = 8  # batches: further ones would save little


class WindowLength:
    """Current length of the window beyond the loader's own ``least`` batches, by ``most`` batches at most.

    ``limit``: bytes of the whole window up to which it may grow. ``per_group``: batches of the window for each batch of
    a group that is admitted together; 0: there are no such groups.
    """

    def __init__(self, least: int, most: int, limit: int, per_group: int = 0) -> None:
        self.extra = 0  # batches beyond the loader's own window
        self.longest = 0  # largest ``extra`` so far
        self.most, self.limit = most, limit
        self.together = 1 if per_group else 0  # batches to admit and to dispatch at once; 0: any number
        self.wanted = 1  # the same, once the window is long enough
        self._least, self._per_group = least, per_group
        self.grown = False  # the window has grown, and no batch has been admitted since
        self.saves = False  # costs vary and the order is strict: batches prepared ahead are a reserve
        self.idled = False  # a lane was idle with a full window since the last delivery
        self._calm = 0  # batches delivered since lanes were last idle

    def out_of_work(self, waits: bool, in_flight: int, batch_bytes: float) -> None:
        """Records that a lane is idle. The window grows now if the consumer ``waits``, else at the next delivery."""
        if waits:
            self.lengthen(in_flight, batch_bytes)
        else:
            self.idled = True

    def lengthen(self, in_flight: int, batch_bytes: float) -> None:
        """Grows the window by a batch, if allowed. ``in_flight``: bytes in the window; ``batch_bytes``: expected of a
        batch, 0 if unknown."""
        self._calm = 0
        if not self.grown and self.extra < self.most and batch_bytes and in_flight + batch_bytes <= self.limit:
            self.extra += 1
            self.longest = max(self.longest, self.extra)
            self.grown = True

    def measured(self, batch_s: float, group_s: float) -> None:
        """Sets how many batches, of ``batch_s`` seconds of work each, make a group of ``group_s`` seconds.

        For strict order alone, where ``together`` is not 0.
        """
        if batch_s > 0:
            self.wanted = max(1, min(_MOST_TOGETHER, int(group_s / batch_s)))
            self._group()

    def delivered(self, batches: int, in_flight: int, batch_bytes: float) -> None:
        """Records that ``batches`` batches were delivered; ``in_flight`` bytes remain in the window.

        The window grows by a batch while it is too short for ``wanted`` batches together, and shrinks by one when it
        exceeds its limit or has not been needed for long.
        """
        wanted = max(0, self._per_group * self.wanted - self._least)
        if self.extra < wanted:
            self.lengthen(in_flight, batch_bytes)
        self._calm += batches
        if in_flight > self.limit or (self._calm >= self.most and self.extra > wanted):
            self.extra = max(0, self.extra - 1)
            self._calm = 0
            self._group()

    def _group(self) -> None:
        """Sets ``together`` to what is wanted and the window has room for."""
        if self._per_group:
            self.together = max(1, min(self.wanted, (self._least + self.extra) // self._per_group))
