"""Reads that several loaders share, with a pool that a test finishes by hand: each loader is a service of its own, and
what becomes of one is no matter to the others."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.memory.arena import Arena
from minato_gpu.sources.blocks import copy
from minato_gpu.sources.service import Service
from minato_gpu.sources.shared_reads import SharedReads, SharedTier
from minato_gpu.sources.source import Source
from tests.sources.by_hand import PAGE, SIZE, content, key


class _Pool:
    """Reads in the order of their numbers; those in ``begun`` have begun."""

    def __init__(self) -> None:
        self.waiting: dict[int, Source] = {}
        self.cancelled: list[int] = []
        self.begun: set[int] = set()

    @property
    def order(self) -> list[str]:
        return [self.waiting[number].path for number in sorted(self.waiting)]

    def submit(self, number: int, source: Source) -> None:
        self.waiting[number] = source

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def hasten(self, number: int, sooner: int, source: Source) -> bool:
        if number in self.begun:
            return False
        del self.waiting[number]
        self.waiting[sooner] = source
        return True


class _Host:
    """Loaders that share; ``pages``: copies that memory keeps."""

    def __init__(self, loaders: int = 2, limit: int = 10**6, pages: int = 0) -> None:
        self.arena, self.later = Arena("test"), deque[Callable[[], object]]()
        self.reads = SharedReads(self.arena, lambda call, *what: self.later.append(partial(call, *what)))
        self.pool = self.reads.pool = _Pool()
        self.memory = SharedTier(pages * PAGE) if pages else None
        self.loaders = [_Loader(self, limit) for _ in range(loaders)]

    def finish(self, path: str, error: BaseException | None = None) -> None:
        """The read of this source ends, with bytes that tell which it is."""
        number = next(number for number, source in self.pool.waiting.items() if source.path == path)
        source, block = self.pool.waiting.pop(number), -1
        if error is None:
            block, view = self.reads.blocks.allocate(SIZE)
            view[:] = content(source.path, SIZE)
        self.reads.done(number, block, 0 if error else SIZE, error)

    def turn(self) -> None:
        """What the event loop does next."""
        while self.later:
            self.later.popleft()()


class _Loader:
    def __init__(self, host: _Host, limit: int) -> None:
        self.host, self.told = host, dict[int, Any]()
        memory = None if host.memory is None else host.memory.part()
        self.service = Service(host.reads.blocks, limit, lambda ready: self.told.update([ready]), memory)
        self.service.pool = host.reads.client(self.service, Mock())

    def want(self, first: int, *paths: str) -> None:
        """One ticket for each, in places of their own."""
        for ticket, path in enumerate(paths, first):
            self.service.want(ticket, [(ticket, ticket, (key(path, SIZE),))])
        self.host.turn()

    def got(self, ticket: int) -> bytes | None:
        (place,) = self.told[ticket]
        found = copy(self.host.arena, *place[:3])
        return None if found is None else found.tobytes()

    def counted(self, *names: str) -> list[Any]:
        counts = self.service.counts()
        return [counts[name] for name in names]


def test_what_two_want_is_read_once_and_freed_by_the_last() -> None:
    host = _Host()
    one, two = host.loaders
    one.want(0, "a")
    two.want(7, "a")
    assert host.pool.order == ["a"]
    host.finish("a")
    assert (one.got(0), two.got(7)) == (content("a", SIZE), content("a", SIZE))
    assert (one.counted("reads", "shared"), two.counted("reads", "shared")) == ([1, 0], [0, 1])
    one.service.release([0])
    assert two.got(7) == content("a", SIZE)
    one.want(1, "a")  # there, as the other has it
    assert one.got(1) == content("a", SIZE) and host.pool.order == []
    two.service.release([7])
    one.service.release([1])
    assert host.arena.allocated == 0
    one.want(2, "a")
    assert host.pool.order == ["a"]


def test_what_one_does_not_want_any_more_the_other_gets() -> None:
    host = _Host()
    one, two = host.loaders
    one.want(0, "a")
    two.want(0, "a")
    one.service.drop()
    host.turn()
    assert not host.pool.cancelled
    host.finish("a")
    assert not one.told and two.got(0) == content("a", SIZE)
    two.service.release([0])
    assert host.arena.allocated == 0


def test_a_read_that_was_cancelled_is_no_one_elses() -> None:
    host = _Host()
    one, two = host.loaders
    one.want(0, "a")
    one.service.drop()
    (cancelled,) = host.pool.cancelled
    two.want(0, "a")
    assert host.pool.order == ["a", "a"]
    host.pool.waiting.pop(cancelled)
    host.reads.done(cancelled, -1, 0, TimeoutError())
    assert not two.told
    host.finish("a")
    assert two.got(0) == content("a", SIZE)


def test_one_that_has_stopped_holds_up_nobody() -> None:
    """It releases nothing: what it holds counts for its own limit, whoever has read it."""
    host = _Host(limit=2 * SIZE)
    stopped, other = host.loaders
    other.want(0, *"abcd")
    stopped.want(0, *"abcd")
    for ticket, path in enumerate("abcd"):
        host.finish(path)
        assert other.got(ticket) == content(path, SIZE)
        other.service.release([ticket])
    assert list(stopped.told) == [0, 1]
    assert host.arena.allocated == 2 * PAGE


def test_loaders_are_read_for_in_turn() -> None:
    host = _Host()
    one, two = host.loaders
    one.want(0, *"abc")
    two.want(0, *"xyz")
    assert host.pool.order == list("axbycz")
    host.finish("a")
    host.finish("x")
    late = _Loader(host, 10**6)
    late.want(0, *"uv")
    assert host.pool.order == list("ubyvcz")


def test_what_one_needs_now_does_not_wait_for_all_that_another_wants_before_it() -> None:
    host = _Host()
    one, two = host.loaders
    ahead = [f"{number}" for number in range(200)]
    one.want(0, *ahead)
    two.want(0, "150", "199")
    assert host.pool.order[:5] == ["0", "150", "1", "199", "2"]
    host.pool.begun.update(host.pool.waiting)
    before = host.pool.order
    two.want(2, "100")
    assert host.pool.order == before
    host.finish("150")
    host.finish("100")
    assert (one.got(150), two.got(0), two.got(2)) == (content("150", SIZE), content("150", SIZE), content("100", SIZE))


# --- what is kept ------------------------------------------------------------------------------------------------


def test_what_one_has_read_all_hit_and_what_came_first_stays() -> None:
    host = _Host(pages=2)
    one, two = host.loaders
    one.want(0, *"abc")
    two.want(0, "a")
    for path in "abc":
        host.finish(path)
    one.service.release(range(3))
    two.service.release([0])
    assert host.arena.allocated == 2 * PAGE
    two.want(1, *"bca")
    assert host.pool.order == ["c"] and (two.got(1), two.got(3)) == (content("b", SIZE), content("a", SIZE))
    memories: list[Any] = [loader.service.counts()["memory"] for loader in host.loaders]
    assert [[memory[name] for name in ("hits", "misses", "copies")] for memory in memories] == [[0, 3, 2], [2, 1, 2]]
    assert memories[0]["why"].startswith("minio: loaders of this host share it")


@pytest.mark.parametrize("pages", [0, 3])
@given(seed=st.integers(0, 10**9))
def test_whatever_loaders_do_all_get_what_they_want_and_no_memory_is_left(pages: int, seed: int) -> None:
    rng, host = random.Random(seed), _Host(loaders=3, limit=4 * SIZE, pages=pages)
    wanted: list[dict[int, str]] = [{} for _ in host.loaders]
    for step in range(60):
        at = rng.randrange(3)
        loader, mine = host.loaders[at], wanted[at]
        what = rng.randrange(8)
        if what < 3:
            mine[step] = rng.choice("abcdefg")
            loader.want(step, mine[step])
        elif what < 6 and host.pool.waiting:
            host.finish(rng.choice(host.pool.order), rng.choice([None, None, OSError()]))
        elif what == 6 and (there := [ticket for ticket in mine if ticket in loader.told]):
            ticket = rng.choice(there)
            assert loader.told[ticket] == () or loader.got(ticket) == content(mine.pop(ticket), SIZE)
            mine.pop(ticket, None)
            loader.service.release([ticket])
        elif what == 7 and not rng.randrange(4):
            mine.clear()
            loader.service.drop()
        if rng.randrange(2):
            host.turn()
    for _ in range(1000):
        host.turn()
        if host.pool.waiting:
            host.finish(host.pool.order[0])
            continue
        for loader, mine in zip(host.loaders, wanted, strict=True):
            loader.service.release([ticket for ticket in mine if ticket in loader.told])
        if not host.pool.waiting and not host.later:
            break
    assert all(ticket in loader.told for loader, mine in zip(host.loaders, wanted, strict=True) for ticket in mine)
    kept = 0 if host.memory is None else len(host.memory._copies)
    assert host.arena.allocated == kept * PAGE <= pages * PAGE
    assert len(host.reads._by_source) <= kept
    assert [loader.service.counts()["bytes_ahead"] for loader in host.loaders] == [0, 0, 0]
    host.arena.close()
