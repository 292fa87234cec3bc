"""What the storage gives: bytes a second, measured while the reader asks for all that it can give.

Where nothing is waited for, requests come seldom, and what they bring tells of the loader, not of the storage. So only
stretches count in which too little was there. Decisions only, told the time.
"""

from __future__ import annotations

from collections import deque

_SHORTEST_S, _LEAST = 0.1, 8  # seconds and reads of a stretch
_STRETCHES = 32


class StorageRate:
    """The upper quartile of recent stretches: the first ones may be slow, while the number of reads at once grows."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_STRETCHES)
        self._since: float | None = None
        self._reads = self._nbytes = 0

    def finished(self, now: float, nbytes: int, *, behind: bool) -> None:
        """A read of so many bytes has ended; ``behind``: too little is there."""
        if not behind:
            self._since = None
            return
        if self._since is None:
            self._since, self._reads, self._nbytes = now, 0, 0
            return
        self._reads += 1
        self._nbytes += nbytes
        if now - self._since >= _SHORTEST_S and self._reads >= _LEAST:
            self._rates.append(self._nbytes / (now - self._since))
            self._since, self._reads, self._nbytes = now, 0, 0

    @property
    def bytes_per_s(self) -> float:
        """0.0 where there has been no such stretch: the storage never was what one waited for."""
        return sorted(self._rates)[3 * len(self._rates) // 4] if self._rates else 0.0
