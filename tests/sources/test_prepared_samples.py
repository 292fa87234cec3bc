"""Samples that loaders prepare for each other, under a clock that a test moves: who prepares what, and what becomes of
those that do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from minato_gpu.memory.arena import Arena
from minato_gpu.sources.blocks import ASKED
from minato_gpu.sources.prepared_samples import (
    _ALONE,
    _DIFFERENT,
    _UNUSED,
    COMPARED,
    LATE_S,
    TOGETHER_S,
    UNFINISHED,
    PreparedSamples,
)
from minato_gpu.sources.sent_samples import SentSample, ask, copy

SIZE = 100
SLOW_S = 10e-3  # what preparing a sample takes


class _InFile(SentSample):
    """A sample in a file."""

    def fill(self, view: memoryview) -> None:
        view[:] = blob(self.number, len(view))


def blob(number: int, nbytes: int) -> bytes:
    return number.to_bytes(8, "little") + bytes(nbytes - 8)


class _Host:
    """Loaders of a group, which have been compared unless ``anew``."""

    def __init__(self, loaders: int = 2, budget: int = 10**6, *, anew: bool = False) -> None:
        self.time = 0.0
        self.nbytes, self.prepare_s = SIZE, SLOW_S
        self.arena, self.timers = Arena("test"), list[tuple[float, Callable[[], None]]]()
        self.shared = PreparedSamples(budget, self.arena, self._later, lambda: self.time)
        self.loaders = [_Loader(self) for _ in range(loaders)]
        for loader in self.loaders:
            loader.part.believed = loader.part.believed or not anew

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self.timers.append((self.time + seconds, call))

    def settle(self) -> None:
        """What would be decided soon is decided now."""
        while soon := [timer for timer in self.timers if timer[0] <= self.time + TOGETHER_S]:
            self.timers.remove(soon[0])
            soon[0][1]()

    def wait(self, seconds: float) -> None:
        """Time passes."""
        end = self.time + seconds
        while due := [timer for timer in self.timers if timer[0] <= end]:
            first = min(due, key=lambda timer: timer[0])
            self.timers.remove(first)
            self.time, call = first
            call()
        self.time = end

    def want(self, *samples: int, admitted: int | None = None) -> None:
        """All of them want these."""
        for loader in self.loaders:
            loader.want(*samples, admitted=admitted)
        self.settle()

    def go_on(self, *loaders: _Loader) -> None:
        """These do all that they may, until there is nothing more."""
        while sum(loader.work() for loader in loaders or self.loaders):
            pass


class _Loader:
    """Tickets are the samples' numbers. ``asked``, ``copies`` and ``own``: what it was told, in this order."""

    def __init__(self, host: _Host) -> None:
        self.host = host
        self.told: list[tuple[int, Any]] = []
        self.prepared: list[int] = []
        self.done: list[int] = []
        self.fails: set[int] = set()
        self.releases = True  # else its releases wait to be sent
        self.draws = 0  # something else than others, unless it is 0
        self.part = host.shared.join("", 1, lambda ready: self.told.append((ready[0], ready[1])))

    def want(self, *samples: int, admitted: int | None = None) -> None:
        for sample in samples:
            self.part.want(sample, sample)
            self.part.ready((sample, ()))
        self.part.admit(max(samples) + 1 if admitted is None else admitted)

    def work(self) -> bool:
        """Prepare what it was told of, and release it."""
        self.host.settle()
        told, self.told = self.told, []
        for sample, places in told:
            self.prepare(sample, places)
        return bool(told)

    def prepare(self, sample: int, places: Any) -> None:
        place = places[0] if places else None
        data = copy(self.host.arena, place) if place and place[0] != ASKED else None
        assert data is None or data.tobytes() == blob(sample, len(data))
        if data is None:
            self.prepared.append(sample)
            if place and place[0] != ASKED:
                self.part.receive(SentSample(sample))
        if place and place[0] == ASKED and sample not in self.fails:
            self.send(sample, place)
        self.done.append(sample)
        if self.releases:
            self.part.release([sample])
        self.host.settle()

    def send(self, sample: int, place: Any) -> None:
        """Say what a worker would."""
        host = self.host
        checksum = xxh3_64_intdigest(blob(sample, host.nbytes)) + self.draws
        file = 0 if place == ask(sample) else -1
        self.part.receive(_InFile(sample, host.prepare_s, 0.0, checksum, host.nbytes, file=file))
        self.host.settle()


def test_each_is_prepared_once() -> None:
    host = _Host(3)
    host.want(*range(60))
    assert [len(loader.told) for loader in host.loaders] == [UNFINISHED] * 3
    host.go_on()
    assert sorted(itertools.chain(*(loader.prepared for loader in host.loaders))) == [*range(60)]
    assert [sorted(loader.done) for loader in host.loaders] == [[*range(60)]] * 3
    counts = [loader.part.counts() for loader in host.loaders]
    assert sum(count["granted"] for count in counts) == 60 == sum(count["copied"] for count in counts) / 2  # type: ignore[misc]
    assert host.arena.allocated == 0 and all(count["again"] == 0 for count in counts)


def test_nobody_waits_for_a_sample_that_another_has_not_in_its_window() -> None:
    host = _Host()
    slow, fast = host.loaders
    slow.want(*range(20), admitted=0)
    fast.want(*range(20))
    host.go_on(fast)
    assert fast.done == [*range(20)] and not slow.told
    slow.part.admit(20)
    host.settle()
    host.go_on()
    assert slow.prepared == [] and slow.part.copied == 20


def test_loaders_that_want_other_samples_soon_send_none() -> None:
    host = _Host(budget=10 * SIZE)
    one, other = host.loaders
    one.want(*range(300))
    other.want(*range(1000, 1300))
    host.go_on()
    assert one.part.granted_count + other.part.granted_count == _UNUSED
    assert (sorted(one.done), sorted(other.done)) == ([*range(300)], [*range(1000, 1300)])
    one.want(*range(2000, 2100))
    host.settle()
    assert [places for _, places in one.told] == [()] * 100


def test_alone_it_sends_some_and_has_its_window_and_a_little_more() -> None:
    (one,) = (host := _Host(1)).loaders
    one.want(*range(_UNUSED))
    host.go_on()
    host.loaders.append(later := _Loader(host))
    later.want(*range(_UNUSED))
    host.go_on()
    assert later.part.again == COMPARED and later.part.copied == _UNUSED - COMPARED
    host.shared.leave(later.part)
    one.want(*range(1000, 1000 + _UNUSED))
    host.go_on()
    one.want(*range(2000, 2200), admitted=2010)
    host.settle()
    assert [ticket for ticket, _ in one.told] == [*range(2000, 2010 + _ALONE)]


def test_what_is_late_is_given_to_another_once() -> None:
    host = _Host(3)
    stopped, *others = host.loaders
    host.want(*range(12))
    host.go_on(*others)
    host.wait(LATE_S / 2)
    assert [len(loader.done) for loader in others] == [8, 8]
    host.wait(LATE_S)
    host.go_on(*others)
    assert [sorted(loader.done) for loader in others] == [[*range(12)]] * 2
    assert len(others[0].prepared) + len(others[1].prepared) == 12
    assert sum(loader.part.again for loader in others) == 4
    host.go_on()  # it is continued
    assert sorted(stopped.done) == [*range(12)] and host.arena.allocated == 0


def test_what_was_granted_and_failed_is_given_to_another() -> None:
    host = _Host()
    one, other = host.loaders
    one.fails = {2}
    host.want(*range(6))
    host.go_on()
    assert sorted(one.done) == sorted(other.done) == [*range(6)] and 2 in other.prepared


def test_a_loader_that_leaves_gives_back_what_it_had() -> None:
    host = _Host(3)
    host.want(*range(12))
    gone, *others = host.loaders
    host.shared.leave(gone.part)
    host.settle()
    host.go_on(*others)
    assert [sorted(loader.done) for loader in others] == [[*range(12)]] * 2 and host.arena.allocated == 0


def test_beyond_the_budget_the_first_goes() -> None:
    host = _Host(budget=3 * SIZE)
    fast, slow = host.loaders
    slow.want(*range(12), admitted=0)
    fast.want(*range(12))
    host.go_on(fast)
    slow.part.admit(12)
    host.settle()
    host.go_on()
    assert slow.prepared == [*range(9)] and slow.part.copied == 3
    assert host.arena.allocated == 0


@pytest.mark.parametrize("left", [False, True])
def test_a_loader_is_believed_once_its_first_samples_were_the_same(left: bool) -> None:
    host = _Host(2, anew=True)
    first, second = host.loaders
    if left:  # the next one is, where the first has left
        host.shared.leave(first.part)
        host.loaders = first, second = [second, _Loader(host)]
    host.want(*range(60))
    assert not second.told
    host.go_on(first)
    assert len(second.told) == COMPARED and second.part.copied == 0
    host.go_on()
    assert first.part.again + second.part.again == COMPARED
    assert [loader.part.believed for loader in (first, second)] == [True, True]
    assert len(first.prepared) + len(second.prepared) == 60 + COMPARED
    assert sorted(first.done) == sorted(second.done) == [*range(60)]


def test_the_first_that_needs_samples_is_believed() -> None:
    """One that has come before, and whose workers are not there yet, would have others prepare a window alone."""
    host = _Host(2, anew=True)
    idle, other = host.loaders
    other.want(*range(60))
    host.go_on(other)
    idle.want(*range(60))
    host.go_on()
    assert len(idle.prepared) == COMPARED and sorted(idle.done) == [*range(60)] == sorted(other.prepared)


def test_one_that_is_not_believed_does_not_wait_for_one_that_is_stopped() -> None:
    host = _Host(2, anew=True)
    _, other = host.loaders
    host.want(*range(20))
    host.wait(2 * LATE_S)
    host.go_on(other)
    assert sorted(other.done) == [*range(20)] and not other.part.believed


def test_one_that_is_not_believed_goes_on_where_another_has_sent_nothing_to_compare() -> None:
    """The other is late once, prepares two samples for itself alone, and waits with its consumer for this one."""
    host = _Host(2, anew=True)
    first, second = host.loaders
    first.releases = False
    host.want(*range(COMPARED))
    host.wait(2 * LATE_S)
    host.go_on()
    assert second.part._equal == UNFINISHED < COMPARED and not second.part.believed
    host.want(*range(20, 24))
    host.go_on(first)
    host.go_on(second)
    assert sorted(second.done) == [*range(COMPARED), *range(20, 24)] and second.part.believed


def test_one_that_was_late_and_another_have_prepared_what_is_not_the_same() -> None:
    host = _Host()
    slow, fast = host.loaders
    slow.draws = 1
    host.want(*range(UNFINISHED))
    host.go_on(fast)
    host.wait(2 * LATE_S)
    host.go_on(fast)
    assert sorted(fast.prepared) == [*range(UNFINISHED)] and not fast.part.group.why_not
    slow.work()
    assert slow.part.counts()["why_not"] == _DIFFERENT


def test_a_difference_ends_it_for_all() -> None:
    host = _Host(3, anew=True)
    host.want(*range(40))
    host.loaders[1].draws = 1
    host.go_on()
    assert all(sorted(loader.done) == [*range(40)] for loader in host.loaders)
    host.loaders[0].want(*range(40, 80), admitted=40)
    host.settle()
    assert len(host.loaders[0].told) == 40
    assert {loader.part.counts()["why_not"] for loader in host.loaders} == {_DIFFERENT}
    assert host.arena.allocated == 0


@pytest.mark.parametrize(
    ("nbytes", "prepare_s", "why"), [(SIZE + 1, 1.0, "is more than"), (SIZE, 1e-4, "takes 0.10 ms, and sharing it")]
)
def test_what_is_no_gain_is_not_shared(nbytes: int, prepare_s: float, why: str) -> None:
    host = _Host(budget=SIZE)
    host.nbytes, host.prepare_s = nbytes, prepare_s
    host.want(*range(200))
    host.go_on()
    assert [sorted(loader.done) for loader in host.loaders] == [[*range(200)]] * 2
    assert why in str(host.loaders[0].part.counts()["why_not"])


@given(st.randoms(use_true_random=False), st.booleans())
def test_whatever_happens_each_has_all(chance: Any, anew: bool) -> None:
    """Loaders that are stopped for a while, start over, leave and come, with a budget for few samples."""
    host = _Host(3, budget=chance.choice([SIZE, 5 * SIZE, 10**6]), anew=anew)
    host.want(*range(40), admitted=chance.choice([0, 8]))
    for _ in range(80):
        loader = chance.choice(host.loaders)
        happens = chance.choice(["work", "work", "work", "admit", "wait", "over", "leave"])
        if happens == "work":
            loader.work()
        elif happens == "admit":
            loader.part.admit(min(40, max(loader.done, default=0) + 8))
        elif happens == "wait":
            host.wait(chance.random())
        elif happens == "over":
            loader.part.drop()
            loader.told, loader.done = [], []
            loader.want(*range(40), admitted=8)
        elif len(host.loaders) > 1:
            host.shared.leave(loader.part)
            host.loaders.remove(loader)
        host.settle()
    for loader in host.loaders:
        loader.part.admit(40)
    for _ in range(10):
        host.settle()
        host.go_on()
        host.wait(1.0)
    assert [sorted(loader.done) for loader in host.loaders] == [[*range(40)]] * len(host.loaders)
    for loader in host.loaders:
        host.shared.leave(loader.part)
    host.settle()
    assert host.arena.allocated == 0 == host.shared._nbytes
