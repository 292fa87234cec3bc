"""Fixed work: so many bytes hashed with SHA-256, never a wait on a clock.

Decisions: hashing, because its cost is linear in the number of operations, does not depend on the data or on
memory bandwidth, and because ``hashlib`` gives up the interpreter lock while it runs, as image decoders do; so the
loaders with threads are not held back by the interpreter. The number of operations that a millisecond buys is
calibrated once for a run and then stays, so that every loader does the same work whatever the clock says.
"""

from __future__ import annotations

import hashlib
import time

import numpy as np

_BLOCK = memoryview(bytes(range(256)) * 256)  # 64 KiB: hashed in one call that releases the lock
_OPERATION_BYTES = 1024
_PER_BLOCK = len(_BLOCK) // _OPERATION_BYTES


def work(operations: int, seed: int) -> int:
    """Do ``operations`` units of work (1 KiB of hashing each); 63 bits that depend on all of it and on ``seed``."""
    digest = hashlib.sha256(seed.to_bytes(8, "little"))
    for _ in range(operations // _PER_BLOCK):
        digest.update(_BLOCK)
    digest.update(_BLOCK[: operations % _PER_BLOCK * _OPERATION_BYTES])
    return int.from_bytes(digest.digest()[:8], "little") >> 1


def calibrate(trials: int = 7, operations: int = 20_000) -> float:
    """Operations that one core does in a millisecond: the median of ``trials``."""
    rates = []
    for trial in range(trials):
        start = time.perf_counter()
        work(operations, trial)
        rates.append(operations / (time.perf_counter() - start) / 1e3)
    return float(np.median(rates))


def sleep_overshoot_s(trials: int = 50) -> float:
    """By how many seconds ``time.sleep`` of about a millisecond is late here: the median of ``trials``."""
    late = []
    for _ in range(trials):
        start = time.perf_counter()
        time.sleep(1e-3)
        late.append(time.perf_counter() - start - 1e-3)
    return max(0.0, float(np.median(late)))
