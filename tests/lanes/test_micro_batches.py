"""Which samples of a micro-batch run again, and with how many others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from minato_gpu.lanes.micro_batches import _PATIENCE, MicroBatches, Size


class Device:
    """Runs micro-batches of numbers. ``bad``: those that fail, which is told with their place if ``names``; ``room``:
    samples that there is memory for."""

    def __init__(self, *bad: int, names: bool = True, room: int = 99) -> None:
        self.bad, self.names, self.room = bad, names, room
        self.ran: list[list[int]] = []
        run: Any = self._run  # results are numbers here, and texts of those that failed
        failed: Any = self._failed
        self.batches = MicroBatches(run, failed, 64)

    def run(self, count: int) -> list[Any]:
        """The results of samples 0 to ``count`` - 1."""
        return self.batches.run([({"n": n}, {}) for n in range(count)])

    def _run(self, samples: Sequence[Any]) -> list[int]:
        numbers = [fields["n"] for fields, _ in samples]
        self.ran.append(numbers)
        if len(samples) > self.room:
            raise MemoryError(f"{len(samples)} samples")
        found = [n for n in numbers if n in self.bad]
        if found:
            what = f"Failed to decode sample #{numbers.index(found[0])} : " if self.names else "something is wrong"
            raise RuntimeError(what)
        return numbers

    @staticmethod
    def _failed(fields: Any, error: Exception) -> str:
        return f"{fields['n']}: {type(error).__name__}"


def without(count: int, *bad: int) -> list[Any]:
    return [f"{n}: RuntimeError" if n in bad else n for n in range(count)]


def test_a_sample_that_is_named_is_taken_out_and_the_others_run_again_together() -> None:
    device = Device(5)
    assert device.run(8) == without(8, 5)
    assert device.ran == [[*range(8)], [0, 1, 2, 3, 4, 6, 7]]
    assert device.batches.repeated == 7


@pytest.mark.parametrize("bad", [(0,), (7,), (1, 6), (0, 1, 2), tuple(range(8))])
@pytest.mark.parametrize("names", [True, False])
def test_each_sample_has_its_own_result_whatever_is_named(bad: tuple[int, ...], names: bool) -> None:
    device = Device(*bad, names=names)
    assert device.run(8) == without(8, *bad)
    assert max(sum(n in ran for ran in device.ran) for n in range(8)) <= 5


def test_where_none_is_named_each_runs_by_itself() -> None:
    device = Device(5, names=False)
    assert device.run(8) == without(8, 5)
    assert device.ran == [[*range(8)], *([n] for n in range(8))]


def test_a_place_that_does_not_exist_names_nobody() -> None:
    device = Device()
    calls = []

    def run(samples: Any) -> Any:
        calls.append(len(samples))
        if len(samples) > 1:
            raise RuntimeError("Failed to decode sample #99 : ")
        return [0]

    failed: Any = device._failed
    found: list[Any] = [*MicroBatches(run, failed, 8).run([({"n": n}, {}) for n in range(3)])]
    assert found == [0, 0, 0]
    assert calls == [3, 1, 1, 1]


def test_where_memory_is_short_no_sample_is_bad_and_nothing_is_kept() -> None:
    device = Device(5, names=False, room=7)
    with pytest.raises(MemoryError):
        device.run(8)
    assert [len(ran) for ran in device.ran] == [8] and device.batches.repeated == 0


def fill(size: Size, count: int) -> None:
    for _ in range(count):
        size.fitted(size.limit)


def test_what_was_halved_grows_again_and_no_further_than_it_was() -> None:
    size = Size(64)
    size.short(64)
    size.short(32)
    assert size.limit == 16
    fill(size, _PATIENCE - 1)
    size.fitted(3)  # not full: it says nothing of 16
    assert size.limit == 16
    fill(size, 1)
    assert size.limit == 32
    fill(size, _PATIENCE)
    assert size.limit == 64
    fill(size, 10 * _PATIENCE)
    assert size.limit == 64


def test_where_that_was_too_much_it_waits_for_twice_as_long() -> None:
    size = Size(64)
    size.short(64)
    waits = []
    for _ in range(3):
        waits.append(0)
        while size.limit == 32:
            fill(size, 1)
            waits[-1] += 1
        size.short(64)
    assert waits == [_PATIENCE, 2 * _PATIENCE, 4 * _PATIENCE]
