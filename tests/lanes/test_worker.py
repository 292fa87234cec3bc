"""What a worker does with a task: seeds, rows, marks, reports, limits, joining, failures."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

from minato_gpu import DataLoader, Field, Pipeline, Stage
from minato_gpu.lanes.base import Blob, Extra, Failure, Local, NoSample, Report, Row, Unshippable
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.status_board import CHUNK, LIMIT, NO_LIMIT, SINCE_NS, STARTED
from minato_gpu.pipeline import TorchFunction
from minato_gpu.samples import sample_seed
from tests.contracts.datasets import Made
from tests.lanes.harness import Bench, Slab, draws, items_of, job, open_links, piece, task
from tests.memory.equality import same
from tests.waiting import wait_until


@pytest.fixture
def links() -> Iterator[WorkerChannels]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with open_links(2) as links:
        yield links
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def values(bench: Bench, reports: list[Report]) -> list[Any]:
    """The samples that the reports refer to."""
    return [bench.store.get(item) for item in items_of(reports)]


def error_of(item: Any) -> tuple[type[BaseException], str]:
    """Type and text of a failure."""
    assert isinstance(item, Failure)
    try:
        item.error.reraise()
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("nothing was raised")


# --- seeds ---------------------------------------------------------------------------------------------------

_SOURCES: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": np.random.random_sample,
    "torch": lambda: torch.rand((), dtype=torch.float64).item(),
}


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "blobs"])
@pytest.mark.parametrize("first", [0, 13, 29], ids="first draw at {}".format)
@pytest.mark.parametrize("source", _SOURCES.values(), ids=_SOURCES.keys())
def test_a_chunk_that_draws_unseeded_is_done_again_seeded(
    links: WorkerChannels, source: Callable[[], float], first: int, rows: bool
) -> None:
    """Same content as from chunks of one; samples before the first draw and the memory of the first try included."""
    calls: list[int] = []

    def make(key: int) -> Any:
        calls.append(key)
        return {"key": key, "draw": source() if key >= first else -1.0}

    bench = Bench(links, job(make))
    slab = Slab(links, {"key": 1, "draw": 1.0}, 30)
    one = piece(range(30), slab=slab.offset if rows else -1)
    got = bench.run(task(one, layout=slab.bytes if rows else None))
    samples = (
        values(bench, got)
        if not rows
        else [
            slab.layout.read(slab.layout.views(links.engine_arena.buffer, slab.offset, 30), row, None)
            for row in range(30)
        ]
    )
    assert len(calls) > 30, "the chunk was not tried without seeds first"
    assert calls[-1] == 29 and set(calls) == set(range(30))
    other = Bench(links, job(make), number=1)
    alone = [values(other, other.run(task(piece([key], position=key), chunk=key + 2)))[0] for key in range(30)]
    assert samples == alone
    assert len({sample["draw"] for sample in samples[first:]}) == 30 - first
    if not rows:
        assert bench.arena is not None and bench.arena.allocated == 30 * 4096, "blobs of the first try were not freed"


def test_a_chunk_without_draws_is_done_once(links: WorkerChannels) -> None:
    calls: list[int] = []

    def make(key: int) -> int:
        calls.append(key)
        return key

    bench = Bench(links, job(make))
    for chunk in range(3):
        assert values(bench, bench.run(task(piece(range(20)), chunk=chunk))) == list(range(20))
    assert calls == [*range(20)] * 3


def test_draws_depend_on_seed_key_and_occurrence_alone(links: WorkerChannels) -> None:
    def drawn(bench: Bench, *keys: int, **more: Any) -> list[Any]:
        return values(bench, bench.run(task(piece(keys, **more))))

    first, second = Bench(links, job(lambda key: draws())), Bench(links, job(lambda key: draws()), number=1)
    in_order = drawn(first, *range(12))
    assert drawn(second, *reversed(range(12)), position=500) == in_order[::-1]
    twice = drawn(first, 3, 3, 3, occurrences=[0, 1, 0])
    assert twice[0] == twice[2] == in_order[3] and twice[1] not in in_order
    other = values(first, first.run(task(piece([3]))._replace(seed=78)))
    assert other[0] not in in_order


def test_seeds_are_those_of_samples(links: WorkerChannels) -> None:
    """What a user can compute: the sample's own seed, from the epoch's."""
    bench = Bench(links, job(lambda key: draws()))
    got = values(bench, bench.run(task(piece(["a", 5]))))
    for key, sample in zip(["a", 5], got, strict=True):
        seed = sample_seed(77, 0, key, 0)
        assert sample[2] == random.Random(seed).random()


@pytest.mark.parametrize("size", [1, 30])
def test_a_samples_error_in_an_unseeded_chunk_does_not_hide_draws(links: WorkerChannels, size: int) -> None:
    def make(key: int) -> Any:
        if key % 10 == 5:
            raise ValueError(f"{key}: {random.random()}")
        return random.random()

    bench, other = Bench(links, job(make)), Bench(links, job(make), number=1)
    got = items_of(bench.run(task(piece(range(5, 5 + size)))))
    for key, item in zip(range(5, 5 + size), got, strict=True):
        alone = items_of(other.run(task(piece([key]))))[0]
        if isinstance(item, Failure):
            text = str(random.Random(sample_seed(77, 0, key, 0)).random())
            assert text in error_of(item)[1] and text in error_of(alone)[1]
        else:
            assert bench.store.get(item) == other.store.get(alone)


def test_worker_init_functions_seed_is_kept_in_samples(links: WorkerChannels) -> None:
    bench = Bench(links, job(lambda key: torch.initial_seed(), worker_init_fn=lambda number: torch.manual_seed(31)))
    for keys in (range(3), range(30)):
        assert set(values(bench, bench.run(task(piece(keys))))) == {31}


# --- rows and blobs ------------------------------------------------------------------------------------------


def _sample(key: int) -> Any:
    return {"x": np.full(3, key, np.float32), "name": f"n{key}"}


def test_rows_go_to_their_places(links: WorkerChannels) -> None:
    """Two pieces of one chunk; a piece that begins in the middle of its slab; strings beside."""
    bench = Bench(links, job(_sample))
    one, two = Slab(links, _sample(0), 3), Slab(links, _sample(0), 5)
    pieces = (piece(range(3), slab=one.offset), piece([11, 12], slab=two.offset)._replace(rows=5, row=1))
    reports = bench.run(task(*pieces, layout=one.bytes))
    items = items_of(reports)
    assert [item.objects for item in items if isinstance(item, Extra)] == [["n0"], ["n1"], ["n2"], ["n11"], ["n12"]]
    same(one.batch([item.objects for item in items[:3]]), default_collate([_sample(key) for key in range(3)]))
    assert two.batch([["", ""]] * 5)["x"][1:3].tolist() == [[11] * 3, [12] * 3]


def test_a_sample_that_does_not_fit_travels_as_an_object(links: WorkerChannels) -> None:
    bench = Bench(links, job(lambda key: np.full(3 + (key == 2), key, np.int16)))
    slab = Slab(links, np.zeros(3, np.int16), 4)
    items = items_of(bench.run(task(piece(range(4), slab=slab.offset), layout=slab.bytes)))
    assert [type(item) for item in items] == [type(None), type(None), Blob, type(None)]
    assert bench.store.get(items[2]).tolist() == [2, 2, 2, 2]
    assert slab.batch()[3].tolist() == [3, 3, 3]


@pytest.mark.parametrize(("sample", "stacks"), [(_sample(1), True), ("text", False), (None, False)])
def test_a_sample_is_described_as_long_as_the_layout_is_unknown(
    links: WorkerChannels, sample: Any, stacks: bool
) -> None:
    bench = Bench(links, job(lambda key: sample))
    described = bench.run(task(piece([1]), layout=b""))[0].layout
    assert described is not None and bool(described) == stacks
    assert bench.run(task(piece([1]), layout=b"x" if stacks else None))[-1].layout is None


def test_threads_hand_objects_over(links: WorkerChannels) -> None:
    with open_links(1, arenas=False) as links:
        made = object()
        bench = Bench(links, job(lambda key: made, seeds_samples=False))
        item = items_of(bench.run(task(piece([1]))))[0]
        assert isinstance(item, Local) and item.value is made


def test_blobs_that_the_parent_gave_back_are_used_again(links: WorkerChannels) -> None:
    bench = Bench(links, job(lambda key: np.zeros(10_000)))
    first = items_of(bench.run(task(piece([1]))))[0]
    assert links.board.give_back(0, first.blocks[0][0])
    assert items_of(bench.run(task(piece([1]), chunk=2)))[0].blocks == first.blocks


# --- failures ------------------------------------------------------------------------------------------------


def test_one_samples_failure_is_its_own(links: WorkerChannels) -> None:
    def make(key: int) -> int:
        if key == 4:
            raise KeyError("no such file")
        return key

    bench = Bench(links, job(make))
    items = items_of(bench.run(task(piece([3, 4, 5], position=70))))
    assert [bench.store.get(items[0]), bench.store.get(items[2])] == [3, 5]
    kind, text = error_of(items[1])
    assert kind is KeyError
    for part in ("no such file", "worker process 0", "epoch 0", "position 71", "index 4", "lane cpu", "in make"):
        assert part in text


@pytest.mark.parametrize("fits", [False, True], ids=["no layout", "layout known"])
def test_an_object_that_cannot_travel_is_said_to_be_one(links: WorkerChannels, fits: bool) -> None:
    """A ``collate_fn`` may still join its batch, where all of it is prepared; also when others were stacked before."""
    bench = Bench(links, job(lambda key: (lambda: 0) if key == 1 else float(key), collate_fn=list))
    slab = Slab(links, 1.0, 3)
    one = piece(range(3), slab=slab.offset if fits else -1)
    items = items_of(bench.run(task(one, layout=slab.bytes if fits else None)))
    assert isinstance(items[1], Unshippable)
    assert slab.batch()[2] == 2.0 if fits else bench.store.get(items[2]) == 2.0


def test_an_object_that_cannot_travel_has_failed_where_it_cannot_be_stacked_either(links: WorkerChannels) -> None:
    bench = Bench(links, job(lambda key: (lambda: 0) if key == 1 else float(key)))
    items = items_of(bench.run(task(piece(range(3), position=20))))
    assert bench.store.get(items[2]) == 2.0
    assert "pickle" in error_of(items[1])[1] and "position 21, index 1, stage 'send', lane cpu" in error_of(items[1])[1]


def test_what_worker_init_fn_raises_comes_with_every_sample(links: WorkerChannels) -> None:
    def init(number: int) -> None:
        raise OSError(f"no disk for worker {number}")

    bench = Bench(links, job(lambda key: key, worker_init_fn=init))
    for item in items_of(bench.run(task(piece(range(12))))):
        assert error_of(item)[0] is OSError and "no disk for worker 0" in error_of(item)[1]


# --- __getitems__ --------------------------------------------------------------------------------------------


class _Many:
    """Counts its calls; key 7 raises, key 8 draws, key 9 makes one sample too few."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __getitem__(self, key: int) -> Any:
        raise AssertionError("__getitems__ comes first")

    def __getitems__(self, keys: list[int]) -> list[Any]:
        self.calls.append(keys)
        if 7 in keys:
            raise ValueError("seven")
        return [(key, random.random() if key == 8 else 0.0) for key in keys if key != 9]


def test_many_samples_are_asked_for_at_once(links: WorkerChannels) -> None:
    dataset = _Many()
    bench = Bench(links, job(dataset))
    assert values(bench, bench.run(task(piece(range(20, 40))))) == [(key, 0.0) for key in range(20, 40)]
    assert dataset.calls == [list(range(20, 40))]


def test_samples_fetched_at_once_cost_the_same(links: WorkerChannels) -> None:
    """Not the first of them all the time, and the others none."""

    class Slow(_Many):
        def __getitems__(self, keys: list[int]) -> list[Any]:
            assert sum(range(1_000_000)) > 0  # fixed work, no clock
            return super().__getitems__(keys)

    (report,) = Bench(links, job(Slow())).run(task(piece(range(20, 28))))
    assert report.times is not None and len(report.times) == 8
    assert max(report.times) < 100 * min(report.times), "some ms each, however long the machine paused in one of them"


def test_an_error_of_many_is_blamed_on_one(links: WorkerChannels) -> None:
    bench = Bench(links, job(_Many()))
    items = items_of(bench.run(task(piece([*range(20, 30), 7, 9, *range(30, 40)]))))
    wrong = {at: error_of(item) for at, item in enumerate(items) if isinstance(item, Failure)}
    assert list(wrong) == [10, 11]
    assert wrong[10][0] is ValueError and "seven" in wrong[10][1] and "index 7" in wrong[10][1]
    assert "returned 0 samples" in wrong[11][1]


def test_draws_of_many_are_those_of_one(links: WorkerChannels) -> None:
    bench, other = Bench(links, job(_Many())), Bench(links, job(_Many()), number=1)
    got = values(bench, bench.run(task(piece([*range(20, 30), 8, *range(30, 40)]))))
    assert got[10] == values(other, other.run(task(piece([8]))))[0]
    assert got[10][1] == random.Random(sample_seed(77, 0, 8, 0)).random()


# --- limits, and what is told meanwhile ----------------------------------------------------------------------


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


def test_no_many_are_asked_for_beyond_a_limit(links: WorkerChannels) -> None:
    """Nor is a limit that grows meanwhile taken for one of the piece after that: it would count from another sample."""

    class Many(_Many):
        def __getitems__(self, keys: list[int]) -> list[Any]:
            bench.set_word(LIMIT, 3)
            return super().__getitems__(keys)

    dataset = Many()
    bench: Bench = Bench(links, job(dataset))
    reports = bench.run(task(piece(range(20, 26)), piece(range(30, 36))))
    assert len(items_of(reports)) == 3 and dataset.calls == [list(range(20, 26))]


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


# --- batches joined where they were prepared -----------------------------------------------------------------


def test_whole_batches_are_joined_at_once(links: WorkerChannels) -> None:
    bench = Bench(links, job(lambda key: key, collate_fn=list))
    items = items_of(bench.run(task(piece(range(3), whole=True), piece([7, 8], position=3, whole=True))))
    assert [type(item) for item in items] == [Blob, type(None), type(None), Blob, type(None)]
    assert items[0].collated and bench.store.get(items[0]) == [0, 1, 2] and bench.store.get(items[3]) == [7, 8]


def test_a_whole_batch_cut_short_goes_out_in_single_samples(links: WorkerChannels) -> None:
    def make(key: int) -> int:
        if key == 1:
            bench.set_word(LIMIT, 2)
        return key

    bench = Bench(links, job(make, collate_fn=list))
    items = items_of(bench.run(task(piece(range(4), whole=True))))
    assert [bench.store.get(item) for item in items] == [0, 1]
    assert not any(item.collated for item in items)


def test_a_batch_cut_short_after_a_batch_with_a_failure_keeps_its_samples(links: WorkerChannels) -> None:
    """Two batches in one chunk: the first has a bad sample, the second is cut short by a limit."""

    def make(key: int) -> int:
        if key == 3:
            raise ValueError("three")
        if key == 5:
            bench.set_word(LIMIT, 6)
        return key

    bench = Bench(links, job(make, collate_fn=list))
    items = items_of(bench.run(task(piece(range(4), whole=True), piece(range(4, 8), position=4, whole=True))))
    assert isinstance(items[3], Failure) and len(items) == 6
    assert [bench.store.get(item) for item in items[4:]] == [4, 5]


def test_a_failure_in_one_batch_leaves_the_others_alone(links: WorkerChannels) -> None:
    def make(key: int) -> int:
        if key == 1:
            raise ValueError("one")
        return key

    bench = Bench(links, job(make, collate_fn=list))
    items = items_of(bench.run(task(piece(range(3), whole=True), piece([7, 8], position=3, whole=True))))
    assert error_of(items[1])[0] is ValueError
    assert bench.store.get(items[3]) == [7, 8]


@pytest.mark.parametrize("kind", ["run", "collate"])
def test_what_collate_raises_names_the_batch(links: WorkerChannels, kind: str) -> None:
    def collate(samples: list[int]) -> Any:
        raise TypeError(f"cannot join {samples}")

    bench = Bench(links, job(lambda key: key, collate_fn=collate))
    if kind == "run":
        reports = bench.run(task(piece([30, 31], position=8, whole=True)))
    else:
        items = [bench.store.put(30), bench.store.put(31)]
        reports = bench.run(task(piece([30, 31], position=8), kind="collate", items=items))
    failure = (reports[-1].items or [])[0]
    assert isinstance(failure, Failure) and failure.collated
    kind_, text = error_of(failure)
    assert kind_ is TypeError
    for part in ("cannot join [30, 31]", "collate", "epoch 0", "positions 8 to 9", "indices [30, 31]"):
        assert part in text


def test_a_job_joins_rows_and_objects(links: WorkerChannels) -> None:
    bench = Bench(links, job(lambda key: key, collate_fn=lambda samples: samples))
    slab = Slab(links, _sample(0), 2)
    slab.layout.write(slab.layout.views(links.engine_arena.buffer, slab.offset, 2), 1, _sample(6))
    items = [bench.store.put("x"), Row(slab.offset, 2, 1, slab.bytes, ["n6"])]
    report = bench.run(task(piece([1, 6]), kind="collate", items=items))[-1]
    same(bench.store.get((report.items or [])[0]), ["x", _sample(6)])


class _Unloadable:
    """Can be sent, and not be loaded."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_job_prepares_what_it_cannot_load(links: WorkerChannels) -> None:
    """All of its batch, and says so; a ``collate_fn`` makes something of it."""
    bench = Bench(links, job(lambda key: _Unloadable(), collate_fn=lambda samples: [type(one) for one in samples]))
    items = [bench.store.put(3), bench.store.put(_Unloadable())]
    report = bench.run(task(piece([1, 6]), kind="collate", items=items))[-1]
    assert bench.store.get((report.items or [])[0]) == [_Unloadable, _Unloadable]
    assert report.repeated == 2


def test_a_batch_of_no_keys(links: WorkerChannels) -> None:
    bench = Bench(links, job(lambda key: key, collate_fn=lambda samples: ("joined", samples)))
    items = items_of(bench.run(task(piece([NoSample()], whole=True))))
    assert bench.store.get(items[0]) == ("joined", [])


@pytest.mark.parametrize("again", ["repeats", "retries"])
def test_what_was_read_is_not_changed_where_samples_may_be_begun_again(links: WorkerChannels, again: str) -> None:
    """A worker that dies in a chunk leaves what a stage that works in place has made of it."""

    def double(fields: Any, _: Any) -> Any:
        fields["x"] *= np.float32(2)
        return {"x": fields["x"]}

    x = Field(np.float32, (3,))
    stage = Stage(
        "double", ("x",), {"x": x}, cpu=double, device=TorchFunction(lambda fields, _: {"x": fields["x"] * 2})
    )
    read = Stage("read", ("n",), {"x": x}, cpu=lambda fields, _: {"x": np.full(3, fields["n"], np.float32)})
    pipeline = Pipeline((read, stage), outputs=("x",))
    bench = Bench(links, job(lambda key: {"n": key}, pipeline=pipeline, **{again: True}))
    found = items_of(bench.run(task(piece([5, 6]), kind="inspect")))
    sources = [item.fields for item in found]
    for chunk in (2, 3):
        prepared = values(bench, bench.run(task(piece([5, 6], sources=sources), chunk=chunk)))
        assert [float(sample["x"][0]) for sample in prepared] == [10.0, 12.0]


def test_workers_that_are_replaced_know_that_samples_may_be_begun_again() -> None:
    for on_worker_death in ("raise", "replace"):
        iterator: Any = iter(DataLoader(Made(4, int), num_workers=1, on_worker_death=on_worker_death))
        lane = iterator._engine.pump.lanes["cpu"]
        assert lane._pool._job.repeats == (on_worker_death == "replace")


# --- streams -------------------------------------------------------------------------------------------------


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise OSError("the disk is gone")


def test_a_stream_yields_batches_then_its_error_then_nothing(links: WorkerChannels) -> None:
    bench = Bench(links, job(_Stream()))
    tasks = [task(kind="next", chunk=number, samples=2) for number in range(1, 5)]
    reports = bench.run(*tasks)
    got = [(report.items or [None])[0] for report in reports]
    assert bench.store.get(got[0]).tolist() == [0, 1] and bench.store.get(got[1]).tolist() == [2, 3]
    assert error_of(got[2])[0] is OSError and "iterating the data set, epoch 0" in error_of(got[2])[1]
    assert reports[3].status == "exhausted" and got[3] is None


def test_a_new_epoch_begins_a_new_stream(links: WorkerChannels) -> None:
    bench = Bench(links, job(_Stream()))
    first, second = task(kind="next", samples=4), task(kind="next", samples=4, chunk=2)._replace(epoch=1)
    for report in bench.run(first, second):
        assert bench.store.get((report.items or [])[0]).tolist() == [0, 1, 2, 3]
