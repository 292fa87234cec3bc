"""What copies read is kept until they are through, also those of a load that is put back half way."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from minato_gpu.memory.loads import Load
from tests.memory.bench import Bench, bench
from tests.support.fake_device import LAZY_COPIES, FakeDevice
from tests.support.waiting import wait_until


class _Short(FakeDevice):
    """There is no memory for the small parts of the second batch: its copies have been issued by then."""

    asked = 0

    def empty(self, nbytes: int) -> torch.Tensor:
        if threading.current_thread().name == "minato-copies":
            self.asked += 1
            if self.asked == 4:
                raise torch.OutOfMemoryError("for the small parts")
        return super().empty(nbytes)


LOADS: dict[str, Callable[[Bench], Load]] = {
    "one slab": lambda one: one.load(2),
    "gathered": lambda one: one.scattered(2),
    "made on the device": lambda one: one.load(2, on_device=(1, 2, 5)),
}


def _put_back(one: Bench, kind: str) -> tuple[Load, Load]:
    """The batch that is due, and the next, which has been put back."""
    first = one.load(1)
    one.issued(first)
    second = LOADS[kind](one)
    assert wait_until(lambda: one.transfers.stats()["short_of_memory"] == 1)
    return first, second


@pytest.mark.parametrize("kind", LOADS)
def test_a_load_that_was_put_back_comes_whole_and_leaves_nothing(kind: str) -> None:
    device = _Short(LAZY_COPIES)
    with bench(device) as one:
        first, second = _put_back(one, kind)
        one.check(one.take(first), 1)
        one.check(one.take(second), 2)
        del first, second
        device.finish()
        assert one.wrong == [] and one.allocated() == 0
    assert device.used == 0


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("kind", LOADS)
def test_closing_waits_for_the_copies_of_a_load_that_was_put_back(kind: str, wanted: bool) -> None:
    """The device notices when the arena is taken from it while it may read that."""
    device = _Short(LAZY_COPIES)
    with bench(device) as one:
        first, second = _put_back(one, kind)
        if not wanted:
            one.transfers.leave(second)
            one.take(first)
        one.close()
        assert one.allocated() == 0
