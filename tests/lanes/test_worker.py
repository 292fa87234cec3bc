"""What a worker does with a task: rows, blobs, failures, many samples at once, streams."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch.utils.data import IterableDataset, default_collate

from minato_gpu.lanes.base import Blob, Extra, Failure, Local, Unshippable
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.memory.status_board import LIMIT
from minato_gpu.samples import sample_seed
from tests.lanes.harness import Bench, Slab, a_sample, error_of, items_of, job, open_links, piece, task, values
from tests.memory.equality import same


def test_rows_go_to_their_places(links: WorkerChannels) -> None:
    """Two pieces of one chunk; a piece that begins in the middle of its slab; strings beside."""
    bench = Bench(links, job(a_sample))
    one, two = Slab(links, a_sample(0), 3), Slab(links, a_sample(0), 5)
    pieces = (piece(range(3), slab=one.offset), piece([11, 12], slab=two.offset)._replace(rows=5, row=1))
    reports = bench.run(task(*pieces, layout=one.bytes))
    items = items_of(reports)
    assert [item.objects for item in items if isinstance(item, Extra)] == [["n0"], ["n1"], ["n2"], ["n11"], ["n12"]]
    same(one.batch([item.objects for item in items[:3]]), default_collate([a_sample(key) for key in range(3)]))
    assert two.batch([["", ""]] * 5)["x"][1:3].tolist() == [[11] * 3, [12] * 3]


def test_a_sample_that_does_not_fit_travels_as_an_object(links: WorkerChannels) -> None:
    bench = Bench(links, job(lambda key: np.full(3 + (key == 2), key, np.int16)))
    slab = Slab(links, np.zeros(3, np.int16), 4)
    items = items_of(bench.run(task(piece(range(4), slab=slab.offset), layout=slab.bytes)))
    assert [type(item) for item in items] == [type(None), type(None), Blob, type(None)]
    assert bench.store.get(items[2]).tolist() == [2, 2, 2, 2]
    assert slab.batch()[3].tolist() == [3, 3, 3]


@pytest.mark.parametrize(("sample", "stacks"), [(a_sample(1), True), ("text", False), (None, False)])
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
    said = error_of(items[1])[1]
    assert "local object" in said and "position 21, index 1, stage 'send', lane cpu" in said


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


@pytest.mark.parametrize("kind", [dict, str, set, iter])
@pytest.mark.parametrize("singly", [False, True])
def test_many_that_are_no_samples(links: WorkerChannels, kind: Any, singly: bool) -> None:
    """A dict's keys are not samples, nor is the order of a set theirs; and the error says what to do."""

    class Many(_Many):
        def __getitems__(self, keys: list[int]) -> Any:
            made = str(keys[0]) if kind is str else kind(dict.fromkeys(keys, 0))
            names.append(type(made).__name__)
            return made

    names: list[str] = []
    bench = Bench(links, job(Many()))
    (item, *_) = items_of(bench.run(task(piece([3]) if singly else piece(range(20, 40)))))
    error, text = error_of(item)
    assert error is TypeError and f"index {3 if singly else 20}" in text
    assert (
        f"given 1 index and returned a {names[0]}," in text and "return a list of samples, one for each index" in text
    )


def test_any_sequence_of_as_many_is_samples(links: WorkerChannels) -> None:
    class Many(_Many):
        def __getitems__(self, keys: list[int]) -> Any:
            return np.asarray(keys)

    bench = Bench(links, job(Many()))
    assert values(bench, bench.run(task(piece(range(20, 40))))) == list(range(20, 40))


def test_draws_of_many_are_those_of_one(links: WorkerChannels) -> None:
    bench, other = Bench(links, job(_Many())), Bench(links, job(_Many()), number=1)
    got = values(bench, bench.run(task(piece([*range(20, 30), 8, *range(30, 40)]))))
    assert got[10] == values(other, other.run(task(piece([8]))))[0]
    assert got[10][1] == random.Random(sample_seed(77, 0, 8, 0)).random()


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
