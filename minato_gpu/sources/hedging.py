"""Decides when to send a slow request a second time, and when to try a failed one again.

A request to remote storage takes ten times as long as usual once in a hundred, and an equal one that is sent then is
mostly sooner there (Dean and Barroso, "The tail at scale", 2013). Such *hedges* are bounded: one for twenty requests.
"""

from __future__ import annotations

import random
from collections import deque

_RECENT = 512
_LEAST = 32  # latencies known before anything is called slow
_QUANTILE = 0.97
_OVER_MEDIAN = 1.5  # where all take much the same, the slowest are not slow
_SHARE = 0.05
_BURST, _FIRST = 16.0, 4.0  # saved up at most, and allowed before anything is known of them
ATTEMPTS = 5
_FIRST_PAUSE_S = 0.1


class Hedging:
    """Follows the latencies of requests of one kind.

    ``patience_s``: how long to wait before asking again; None: not known yet.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._since_sorted = _RECENT
        self.patience_s: float | None = None
        self._allowed = _FIRST

    def finished(self, latency_s: float) -> None:
        """Notes that a request has been answered; of two, the time of the answered one."""
        self._recent.append(latency_s)
        self._allowed = min(_BURST, self._allowed + _SHARE)
        self._since_sorted += 1
        if self._since_sorted >= _LEAST and len(self._recent) >= _LEAST:
            self._since_sorted = 0
            known = sorted(self._recent)
            self.patience_s = max(known[int(_QUANTILE * len(known))], _OVER_MEDIAN * known[len(known) // 2])

    def take(self) -> bool:
        """Counts a slow request that is sent once more. Returns False if none may be."""
        if self._allowed < 1.0:
            return False
        self._allowed -= 1.0
        return True


def pause_s(failures: int) -> float:
    """Returns the seconds to wait after so many failures of a read, with a random spread so that not all retry at
    once."""
    return float(_FIRST_PAUSE_S * 2 ** (failures - 1)) * random.uniform(0.5, 1.5)


def is_final(error: BaseException) -> bool:
    """Returns whether the same request would fail again."""
    final = (
        PermissionError,
        FileNotFoundError,
        IsADirectoryError,
        NotADirectoryError,
        EOFError,
        ValueError,
        TypeError,
        ImportError,
    )
    status = _status(error)
    return isinstance(error, final) or (status is not None and 400 <= status < 500 and status not in (408, 429))


def _status(error: BaseException) -> int | None:
    """Returns HTTP's status of an error (or of its cause), where aiohttp, gcsfs, adlfs, requests and botocore put
    it."""
    for each in (error, error.__cause__):
        response = getattr(each, "response", None)
        more = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        for place, name in ((each, "status"), (each, "status_code"), (each, "code"), (response, "status_code")):
            if isinstance(found := getattr(place, name, None), int):
                return found
        if isinstance(found := more.get("HTTPStatusCode"), int):
            return found
    return None
