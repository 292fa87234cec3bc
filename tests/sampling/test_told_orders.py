"""Orders that samplers tell themselves: taken as they are, and left out where they are of no use."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from minato_gpu.sampling.told_orders import ToldOrders, told_by
from tests.sampling.test_look_ahead import epoch, listed, looking


@dataclass(frozen=True)
class Rotated:
    """Each epoch begins one key later."""

    count: int

    def order(self, epoch: int) -> list[int]:
        return [(key + epoch) % 9 for key in range(self.count)]


class Sampler:
    """Any class."""

    def __init__(self, orders: Any) -> None:
        self.orders, self.epoch = orders, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.orders.order(self.epoch))

    def __len__(self) -> int:
        return 3


class Batches:
    """Of the user's own making; it knows no epochs."""

    orders = Rotated(9)

    def __iter__(self) -> Iterator[list[int]]:
        return iter([])


def test_told_by_the_epoch_that_the_sampler_was_told() -> None:
    sampler = Sampler(Rotated(3))
    look = looking(sampler)
    sampler.set_epoch(5)
    first = look(epoch(0))
    assert (first.shards, first.once) == (3.0, False)
    assert listed(first, 0, 1) == [[5, 6, 7], [6, 7, 8]]
    sampler.set_epoch(6)
    assert look(epoch(1)).orders == first.orders
    third = look(epoch(2))  # set_epoch was forgotten
    assert third.orders != first.orders
    assert listed(third, 2, 3) == [[6, 7, 8]] * 2


def test_a_batch_sampler_that_knows_no_epochs() -> None:
    batches: Any = Batches()
    begun = looking(None, batches)(epoch(2))
    assert listed(begun, 2) == [[2, 3, 4, 5, 6, 7, 8, 0, 1]]
    assert begun.shards == 1


class Raises:
    """It cannot tell."""

    def order(self, epoch: int) -> list[int]:
        raise RuntimeError("no idea")


class Letters:
    """It tells something else."""

    def order(self, epoch: int) -> list[str]:
        return ["a"]


class Rows:
    """Batches."""

    def order(self, epoch: int) -> list[list[int]]:
        return [[1, 2], [3, 4]]


@pytest.mark.parametrize("orders", [Raises(), Letters(), Rows()], ids=lambda orders: type(orders).__name__)
def test_orders_that_are_of_no_use(orders: Any, caplog: pytest.LogCaptureFixture) -> None:
    told = ToldOrders(pickle.dumps(orders), 0, 1)
    assert told.order(0) is None and told.order(1) is None
    (record,) = caplog.records
    assert "of no use to the cache" in record.getMessage()


def test_an_epoch_without_any_key() -> None:
    found = ToldOrders(pickle.dumps(Rotated(0)), 0, 1).order(0)
    assert found is not None and found.dtype == np.int64 and len(found) == 0


def test_what_cannot_be_sent_is_said(caplog: pytest.LogCaptureFixture) -> None:
    sampler = Sampler(Rotated(3))
    sampler.orders.__dict__["local"] = lambda: None
    assert told_by(sampler) is None
    assert "cannot be pickled" in caplog.text
    assert told_by(Sampler([[1, 2]])) is None, "something else of that name"
