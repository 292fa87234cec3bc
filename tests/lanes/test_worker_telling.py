"""What a worker tells of a task while it goes on, and where it stops."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu.lanes.base import Blob, Unshippable
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.status_board import CHUNK, LIMIT, NO_LIMIT, SINCE_NS, STARTED
from minato_gpu.samples import sample_seed
from tests.lanes.harness import Bench, Slab, draws, items_of, job, piece, task, values
from tests.support.waiting import wait_until


def test_the_board_shows_where_the_worker_is(links: WorkerChannels) -> None:
    seen: list[tuple[int, int]] = []

    def look(key: int) -> int:
        seen.append((bench.word(CHUNK), bench.word(STARTED)))
        return key

    bench: Bench = Bench(links, job(look))
    bench.run(task(piece(range(3)), chunk=41))
    assert seen == [(41, 1), (41, 2), (41, 3)]
    assert bench.word(CHUNK) == -1 and bench.word(SINCE_NS) > 0 and bench.word(LIMIT) == NO_LIMIT


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("draws_too", [False, True])
def test_a_limit_stops_a_chunk_before_the_next_sample(links: WorkerChannels, pieces: int, draws_too: bool) -> None:
    """Also when the chunk is being done again because it drew."""
    calls: list[int] = []

    def make(key: int) -> Any:
        calls.append(key)
        if key == 9:
            bench.set_word(LIMIT, 10)
        return random.random() if draws_too else key

    bench = Bench(links, job(make))
    spans = [range(20)] if pieces == 1 else [range(7), range(7, 20)]
    reports = bench.run(task(*(piece(span, position=span[0]) for span in spans)))
    assert len(items_of(reports)) == 10 and max(calls) == 9
    assert len(items_of(bench.run(task(piece(range(100, 120)), chunk=2)))) == 20, "the limit stayed for the next chunk"


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("draws_too", [False, True])
def test_a_worker_stops_at_its_credit(links: WorkerChannels, pieces: int, draws_too: bool) -> None:
    """At the first sample that comes to it, whether its lease is done twice or not, and says what is left."""
    sizes = [10, 20, 5_000, 10, 10, 10]
    bench = Bench(links, job(lambda key: torch.zeros(sizes[key], dtype=torch.uint8) + int(draws_too and draws()[0])))
    spans = [range(6)] if pieces == 1 else [range(3), range(3, 6)]
    one = task(*(piece(span, position=span[0]) for span in spans))
    assert [len(each) for each in values(bench, bench.run(one._replace(credit=4_000)))] == sizes[:3]
    assert [len(each) for each in values(bench, bench.run(one._replace(credit=1, chunk=2)))] == sizes[:1]
    assert len(items_of(bench.run(one._replace(chunk=3)))) == 6


def test_what_a_worker_has_prepared_beyond_its_credit_is_taken_off_the_next(links: WorkerChannels) -> None:
    """Until a task comes that was dispatched by one who knew of it."""
    bench = Bench(links, job(lambda key: torch.zeros(1_000, dtype=torch.uint8)))
    one = task(piece(range(6)))._replace(credit=2_500)

    def prepared(chunk: int, ended: dict[int, int]) -> int:
        return len(items_of(bench.run(one._replace(chunk=chunk, ended=ended))))

    first = prepared(1, {})
    assert first == 3, "and one of them overdrawn in part"
    assert prepared(2, {}) < first and prepared(3, {1: 1}) < first
    assert prepared(4, {0: 3}) == first
    bench.run(one._replace(chunk=5, credit=1, ended={0: 4}))
    assert not items_of(bench.run(one._replace(chunk=6, credit=500, ended={0: 4})))
    assert len(items_of(bench.run(one._replace(run=2, chunk=7, ended={})))) == first, "a run that is over"


def test_what_is_finished_is_told_while_a_sample_blocks(links: WorkerChannels) -> None:
    gate = threading.Event()

    def make(key: int) -> int:
        assert key != 5 or gate.wait(20)
        return key

    bench = Bench(links, job(make, seeds_samples=False))
    with bench.running(task(piece(range(8)), singly=True)) as reports:
        assert wait_until(lambda: bench.word(STARTED) == 6)
        reports += bench.told(unfinished=True)
        assert [(report.done, report.final) for report in reports] == [(5, False)]
        assert bench.told(unfinished=True) == []
        gate.set()
    assert values(bench, reports) == list(range(8))


def test_cheap_samples_of_a_place_are_told_before_those_of_the_next(links: WorkerChannels) -> None:
    """A slow sample of the next batch does not hold up this one."""
    gate = threading.Event()

    def make(key: int) -> int:
        assert key != 5 or gate.wait(20)
        return key

    bench = Bench(links, job(make))
    with bench.running(task(piece(range(5)), piece(range(5, 8), position=5))) as reports:
        assert wait_until(lambda: bench.word(STARTED) == 6)
        reports += bench.told(unfinished=True)
        assert [(report.done, report.final) for report in reports] == [(5, False)]
        gate.set()
    assert values(bench, reports) == list(range(8))


@pytest.mark.parametrize("when", ["in an earlier sample", "before it blocks", "after it blocks"])
def test_an_unseeded_draw_is_never_told(links: WorkerChannels, when: str) -> None:
    """Also where what was finished before it had been told already."""
    gate = threading.Event()
    tries: list[int] = []
    drawing = 2 if when == "in an earlier sample" else 5

    def make(key: int) -> Any:
        value = random.random() if key == drawing and when != "after it blocks" else 0.0
        if key == 5 and not gate.is_set():
            tries.append(key)
            assert gate.wait(20)
        return random.random() if key == drawing and when == "after it blocks" else value

    bench = Bench(links, job(make))
    with bench.running(task(piece(range(10)), singly=True)) as reports:
        assert wait_until(lambda: tries)
        reports += bench.told(unfinished=True)
        assert reports[-1].done == 5
        gate.set()
    got = [0.0] * 10
    got[drawing] = random.Random(sample_seed(77, 0, drawing, 0)).random()
    assert values(bench, reports) == got


def test_costly_samples_are_told_one_by_one(links: WorkerChannels, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what each took (fixed work, no clock)."""
    published = _told_at_a_time(links, monkeypatch)
    bench = Bench(links, job(_costly))
    (report,) = bench.run(task(piece(range(6))))
    assert published == [1] * 6
    assert values(bench, [report]) == list(range(6))
    assert report.seconds <= report.end - report.begin + 1e-6
    assert report.times is not None and len(report.times) == 6 and min(report.times) > 0


@pytest.mark.parametrize(
    ("changes", "more", "seconds", "told"),
    [
        ({"in_order": True}, {}, 1e9, [4, 2]),
        ({"in_order": True}, {}, 0.0, [1] * 6),
        ({}, {}, 1e9, [1] * 6),
        ({"in_order": True}, {"singly": True}, 1e9, [1] * 6),
        ({"in_order": True}, {"credit": 1 << 30}, 1e9, [1] * 6),
    ],
    ids=["together", "after a while", "another may be delivered before", "a worker died at several", "with a credit"],
)
def test_costly_samples_of_a_batch_that_waits_for_all_are_told_together(
    links: WorkerChannels,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    more: dict[str, Any],
    seconds: float,
    told: list[int],
) -> None:
    """Those of one batch, with what each took and when each was ready."""
    monkeypatch.setattr("minato_gpu.lanes.worker.TELL_ROWS_S", seconds)
    published = _told_at_a_time(links, monkeypatch)
    bench = Bench(links, job(_costly, **changes))
    slabs = [Slab(links, 1, rows) for rows in (4, 2)]
    pieces = piece(range(4), slab=slabs[0].offset), piece(range(4, 6), position=4, slab=slabs[1].offset)
    (report,) = bench.run(task(*pieces, layout=slabs[0].bytes, **more))
    assert published == told
    assert [slab.batch().tolist() for slab in slabs] == [[0, 1, 2, 3], [4, 5]]
    assert report.times is not None and report.ends is not None and len(report.times) == 6
    assert (np.diff(report.ends) >= np.array(report.times[1:]) - 1e-6).all()
    assert report.ends[0] - report.times[0] >= report.begin - 1e-6 and report.ends[-1] == report.end


def _costly(key: int) -> int:
    return key if sum(range(200_000)) else -1


def _told_at_a_time(links: WorkerChannels, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Will hold how many samples each mark told of."""
    published: list[int] = []
    publish = links.bell.publish

    def count(begin: int, took: Sequence[float], *rest: Any) -> None:
        published.append(len(took))
        publish(begin, took, *rest)

    monkeypatch.setattr(links.bell, "publish", count)
    return published


def test_the_layout_comes_by_message_and_samples_are_marked(links: WorkerChannels) -> None:
    """Once for a task. While a later sample blocks, those before it are known of all the same."""
    bench = Bench(links, job(lambda key: np.full(3, key)))
    bench.give(task(piece(range(4)), layout=b""))
    bench.worker.run()
    assert [(report.first, report.done, report.layout is None) for report in bench.channel.reports] == [(0, 0, False)]
    assert [value.tolist() for value in values(bench, bench.told())] == [[key] * 3 for key in range(4)]


def test_marks_and_messages_of_one_task_tell_every_sample_once(links: WorkerChannels) -> None:
    """The third sample cannot be pickled where its ``collate_fn`` may make something of it."""
    bench = Bench(links, job(lambda key: (lambda: key) if key == 2 else key, collate_fn=list))
    items = items_of(bench.run(task(piece(range(5)))))
    assert [type(item) for item in items] == [Blob, Blob, Unshippable, Blob, Blob]
