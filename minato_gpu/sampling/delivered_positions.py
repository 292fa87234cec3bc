"""Records which positions of an epoch have been delivered: all below a line, and some above it, as many as a window
holds.

Delivered means returned by ``__next__``. The last batches are remembered one by one, for consumers that read ahead of
what they use: ``rewound(n)`` is the record as it was n batches ago.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from minato_gpu.scheduling.spans import Span, joined, without

HISTORY = 256  # batches that can be taken back
_Record = tuple[int, int, Sequence[Span], int]
_MOST_SPANS = 1 << 17  # above the line, in a state from a file


class DeliveredPositions:
    """The positions of one epoch that have been delivered: all below ``low``, and the spans ``above`` it."""

    def __init__(self, batches: int = 0, low: int = 0, above: Sequence[Span] = (), failed: int = 0) -> None:
        self.batches = batches  # in which they were delivered
        self.low = low
        self.above = list(above)  # disjoint, not touching, rising, all above ``low``; never changed in place
        self.failed = failed  # samples left out so far, as ``max_failures`` counts them
        # the record before each of the last batches, and whether the consumer got that
        self._recent: deque[tuple[_Record, bool]] = deque(maxlen=HISTORY)

    @property
    def floor(self) -> int:
        """The lowest ``low`` that any record returned by ``rewound`` can have."""
        return self._recent[0][0][1] if self._recent else self.low

    @property
    def samples(self) -> int:
        """The number of positions that have been delivered."""
        return self.low + sum(hi - lo for lo, hi in self.above)

    @property
    def top(self) -> int:
        """The end of the positions delivered: all lie below it."""
        return self.above[-1][1] if self.above else self.low

    def add(self, batch: Sequence[Span], failed: int = 0, *, returned: bool = True) -> None:
        """Notes that a batch of these positions was delivered.

        ``failed`` is how many samples of the epoch have been left out by now. ``returned`` is False if the batch was
        dealt with otherwise: left out, or raised.
        """
        self._recent.append(((self.batches, self.low, self.above, self.failed), returned))
        self.batches += 1
        self.failed = failed
        if not self.above and len(batch) == 1 and batch[0][0] == self.low:  # in order
            self.low = batch[0][1]
        else:
            self._settle(sorted([*self.above, *batch]))

    def _settle(self, spans: Iterable[Span]) -> None:
        """Adds spans above the line: joins neighbours, and raises the line over what begins at it."""
        (_, self.low), *self.above = joined([(0, self.low), *spans])

    def rewound(self, batches: int) -> DeliveredPositions:
        """Returns the record as it was before the last ``batches`` batches that the consumer got (0: this one itself).

        Raises ValueError if that is further back than is remembered.
        """
        if batches == 0:
            return self
        got = [before for before, returned in self._recent if returned]
        if batches > len(got):
            raise ValueError(
                f"ahead={batches}: this iterator has delivered {self.batches} batches, and the last {len(got)} can be "
                "taken back"
            )
        return DeliveredPositions(*got[-batches])

    def left_of(self, lo: int, hi: int) -> tuple[Span, ...]:
        """Returns what is still to be delivered of the positions ``lo`` to ``hi`` - 1."""
        gone = [(0, self.low), *self.above] if self.low else self.above
        return tuple(without([(lo, hi)], [(max(a, lo), min(b, hi)) for a, b in gone if a < hi and b > lo]))

    # --- as plain data --------------------------------------------------------------------------------------

    def bits(self) -> bytes:
        """Returns the positions above the line, one bit each: bit i of byte j stands for ``low + 8 * j + i``."""
        if not self.above:
            return b""
        mask = 0
        for lo, hi in self.above:
            mask |= ((1 << (hi - lo)) - 1) << (lo - self.low)
        return mask.to_bytes((mask.bit_length() + 7) // 8, "little")

    @classmethod
    def of_bits(cls, batches: int, low: int, bits: bytes) -> DeliveredPositions:
        """Returns the record that ``bits`` and the two numbers describe.

        Raises ValueError for more spans than can be true.
        """
        ones = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
        changes = np.diff(ones, prepend=np.uint8(0), append=np.uint8(0))
        if (found := int(np.count_nonzero(changes)) // 2) > _MOST_SPANS:
            raise ValueError(f"state: 'above' has {found} spans, more than a run leaves behind")
        ends = [low + edge for edge in np.flatnonzero(changes).tolist()]
        delivered = cls(batches, low)
        delivered._settle(zip(ends[::2], ends[1::2], strict=True))
        return delivered
