"""How far ahead of the consumer a loader's sampler is drawn."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from minato_gpu import DataLoader
from minato_gpu.engine import engine
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")

_FIXED, _LATER = 16, 20  # samples of four batches of four; one that comes after them


class Counted:
    """A sampler that counts what has been drawn of it; ``raises_at``: in place of this key."""

    def __init__(self, raises_at: int | None = None) -> None:
        self.drawn, self._raises_at = 0, raises_at

    def __iter__(self) -> Iterator[int]:
        for key in range(64):
            self.drawn += 1
            if key == self._raises_at:
                raise ZeroDivisionError
            yield key


class FirstWaits:
    """The first sample is held up until ``later`` others are prepared; each has ``nbytes``.

    ``begin``: when any of them may be.
    """

    def __init__(self, later: int, nbytes: int = 8) -> None:
        self._later, self._nbytes = later, nbytes
        self.prepared = 0
        self.begin: Callable[[], object] = lambda: True
        self._lock = threading.Lock()

    def __getitem__(self, key: int) -> Any:
        assert wait_until(self.begin)
        if key == 0:
            assert wait_until(lambda: self.prepared >= self._later)
        with self._lock:
            self.prepared += 1
        return np.full(self._nbytes // 8, key)


def loader(dataset: FirstWaits, sampler: Counted, **more: Any) -> DataLoader[Any]:
    return DataLoader(dataset, 4, sampler=sampler, num_workers=2, worker_kind="thread", **more)  # type: ignore[arg-type]


def test_others_are_prepared_while_a_slow_sample_holds_the_window_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_LOOK_S", 0.0)
    dataset, sampler = FirstWaits(_LATER), Counted()
    one = loader(dataset, sampler, persistent_workers=True)
    dataset.begin = lambda: one._session.engine is not None and one._session.engine.pump.run.arrivals is not None
    iterator = iter(one)
    first = next(iterator)
    dataset.begin = lambda: True
    assert [int(row[0]) for batch in (first, *iterator) for row in batch] == list(range(64))
    window, wait = one.stats()["window"], one.stats()["longest_waits"][0]
    assert 4 < window["longest"] <= window["most"] == 32 and window["limit_bytes"] == 64 << 20
    assert (wait["batch"], wait["key"], wait["lane"]) == (0, 0, "cpu")
    assert [*wait["causes"]][:2] == ["preparation", "slow sample"]
    assert sum(wait["causes"].values()) == pytest.approx(wait["seconds"])


@pytest.mark.parametrize(
    ("nbytes", "more"),
    [(8, {"prefetch_factor": 2}), (5 << 20, {}), (1 << 10, {"host_memory_budget": 16 << 10})],
    ids=["as the user says", "64 MiB", "the budget"],
)
def test_no_further_than(nbytes: int, more: dict[str, Any]) -> None:
    """Once all that the window holds is prepared, nothing more has been drawn (of large samples, not much more)."""
    dataset, sampler = FirstWaits(_FIXED - 1 if "host_memory_budget" not in more else 1, nbytes), Counted()
    one = loader(dataset, sampler, **more)
    next(iter(one))
    assert sampler.drawn <= _FIXED + 4, "the window, and the batch that followed on the first one"
    # the budget has room for one more batch once the first is delivered
    assert 4 <= one.stats()["window"]["longest"] <= 4 + ("host_memory_budget" in more)


def test_an_error_of_the_sampler_comes_no_sooner() -> None:
    """It is drawn beyond the window as it was at first, and raised when that would have come to it."""
    one = loader(FirstWaits(_LATER - 1), Counted(raises_at=_LATER))
    taken = 0
    with contextlib.suppress(ZeroDivisionError):
        for taken, _ in enumerate(one, 1):  # noqa: B007
            pass
    assert taken == 2, "the error is in the sixth batch, and the window had four"
