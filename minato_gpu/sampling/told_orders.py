"""Orders that a sampler tells itself, and how its count of epochs goes along with the loader's.

A sampler (or batch sampler) of any class may have an attribute ``orders`` with a method ``order(epoch)``: the keys of
that epoch, as it was told by ``set_epoch`` (or, where it has none, by the loader's count), one after the other. It is
pickled and asked in the reader process, of epochs to come, so that whatever it does there has no effect in the training
process. Two that are equal must tell the same.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from minato_gpu.caching.future import Integers
from minato_gpu.lazily import cached_property
from minato_gpu.notices import say_once
from minato_gpu.samples import Value


class Counted(NamedTuple):
    """The epoch that a sampler is told is ``first`` plus ``stride`` times the loader's own count."""

    first: int
    stride: int


def count_of(told: int | None, epoch: int, before: Counted | None) -> Counted:
    """``told``: what ``set_epoch`` was told last, None where there is none; ``before``: of the epoch before."""
    if told is None:
        return Counted(0, 1)
    stride = 1
    if before is not None and before.first + before.stride * (epoch - 1) == told:
        stride = 0  # nobody has called set_epoch: every epoch is the same
    return Counted(told - stride * epoch, stride)


@dataclass(frozen=True)
class ToldOrders:
    """``told``: the sampler's own, pickled; the rest as ``Counted`` has it."""

    told: bytes
    first: int
    stride: int

    @cached_property
    def _orders(self) -> Any:
        return pickle.loads(self.told)

    def order(self, epoch: int) -> Integers | None:
        """See ``Orders``; None, said once, where it raises or tells no keys."""
        try:
            keys = np.asarray(self._orders.order(self.first + self.stride * epoch))
            if keys.ndim != 1 or (len(keys) and keys.dtype.kind not in "iu"):
                raise ValueError("it must return whole numbers, one for each sample")
        except Exception as error:
            say_once(f"The sampler's orders.order() is of no use to the cache, which goes on without: {error!r}")
            return None
        return keys.astype(np.int64)


def told_by(sampler: Value) -> bytes | None:
    """What the sampler tells of its orders, pickled; None where it tells nothing, or that cannot be sent."""
    orders = getattr(sampler, "orders", None)
    if not callable(getattr(orders, "order", None)):
        return None
    try:
        return pickle.dumps(orders, 5)
    except Exception as error:
        say_once(f"The sampler's orders cannot be pickled, so the cache goes on without: {error!r}")
        return None
