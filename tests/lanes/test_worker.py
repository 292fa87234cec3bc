"""What a worker does with a task: rows, blobs, many samples at once, draws, where it stops, when it reports, and what
it says that samples have cost."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import Field, Pipeline, Stage
from minato_gpu.lanes.base import Blob, Failure, Handed, Row
from minato_gpu.lanes.progress import LeaseProgress
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.pipeline.pipeline import TorchFunction
from minato_gpu.samples import sample_seed
from tests.lanes.harness import Bench, Slab, a_sample, draws, error_of, items_of, job, piece, task, values
from tests.support.same import same
from tests.support.waiting import wait_until


@pytest.mark.parametrize("kind", [dict, str])
@pytest.mark.parametrize("singly", [False, True])
def test_many_that_are_no_samples(links: WorkerChannels, kind: Any, singly: bool) -> None:
    """A dict's keys are not samples, nor is the order of a set theirs; and the error says what to do."""

    class Many:
        def __getitem__(self, key: int) -> Any:
            raise AssertionError("__getitems__ comes first")

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


@pytest.mark.parametrize("kind", ["blob", "row"])
def test_what_a_collate_fn_keeps_of_a_sample_stays_as_it_is(links: WorkerChannels, kind: str) -> None:
    """The memory that it was handed over in is used again for other samples."""
    kept: list[Any] = []

    def collate(samples: list[Any]) -> int:
        kept.extend(samples)
        return len(samples)

    bench, slab = Bench(links, job(lambda key: key, collate_fn=collate)), Slab(links, a_sample(0), 1)
    rows, blob = slab.layout.views(links.engine_arena.buffer, slab.offset, 1), bench.store.put(a_sample(3))
    assert isinstance(blob, Blob)
    slab.layout.write(rows, 0, a_sample(3))
    items: list[Any] = [blob if kind == "blob" else Row(slab.offset, 1, 0, slab.bytes, ["n3"])]
    bench.run(task(piece([3], joins=True, stored=items), kind="collate"))
    slab.layout.write(rows, 0, a_sample(4))
    for offset, nbytes in blob.blocks:
        links.buffer(blob.worker)[offset : offset + nbytes] = bytes(nbytes)
    assert same(kept, [a_sample(3)])


X = Field(np.float32, (3,))
READ = Stage("read", ("n",), {"x": X}, cpu=lambda fields, _: {"x": np.full(3, fields["n"], np.float32)})


@pytest.mark.parametrize("again", ["repeats", "retries"])
def test_what_was_read_is_not_changed_where_samples_may_be_begun_again(links: WorkerChannels, again: str) -> None:
    """A worker that dies in a chunk leaves what a stage that works in place has made of it."""

    def double(fields: Any, _: Any) -> Any:
        fields["x"] *= np.float32(2)
        return {"x": fields["x"]}

    stage = Stage("double", ("x",), {"x": X}, double, TorchFunction(lambda fields, _: {"x": fields["x"] * 2}))
    pipeline = Pipeline((READ, stage), outputs=("x",))
    bench = Bench(links, job(lambda key: {"n": key}, pipeline=pipeline, **{again: True}))
    found = items_of(bench.run(task(piece([5, 6]), kind="inspect")))
    sources = [item.fields for item in found]
    for chunk in (2, 3):
        prepared = values(bench, bench.run(task(piece([5, 6], sources=sources), chunk=chunk)))
        assert [float(sample["x"][0]) for sample in prepared] == [10.0, 12.0]


def _plus_one(fields: Any, _: Any) -> Any:
    return {"x": fields["x"] + np.float32(1)}


def test_what_later_stages_draw_lies_with_what_was_read(links: WorkerChannels) -> None:
    """The same as whoever goes on would draw; nothing where a stage cannot: it says so itself."""

    def draw(rng: np.random.Generator, meta: Any) -> Any:
        if meta["x"][0] == 6:
            raise ValueError("not for this one")
        return {"y": float(rng.random())}

    add = Stage("add", ("x",), {"x": X}, _plus_one, TorchFunction(_plus_one))
    shift = Stage("shift", ("x",), {"x": X}, _plus_one, TorchFunction(_plus_one), draw, meta=("x",))
    pipeline = Pipeline((READ, shift, add), outputs=("x",))
    bench = Bench(links, job(lambda key: {"n": key}, pipeline=pipeline))
    given = task(piece([5, 6]), kind="inspect")
    found = [bench.store.get(item.fields) for item in items_of(bench.run(given))]
    fields = {"x": np.full(3, 5, np.float32)}
    assert found[0][1] == {1: pipeline.draw(1, fields, sample_seed(given.seed, 0, 5)), 2: {}}
    assert [float(one["x"][0]) for one, _ in found] == [5.0, 6.0] and found[1][1] is None
    sources = [item.fields for item in items_of(bench.run(given._replace(chunk=3)))]
    (failure,) = items_of(bench.run(task(piece([6], sources=sources[1:]), chunk=4)))
    assert isinstance(failure, Failure) and failure.origin is not None and failure.origin.stage == "shift"


def test_a_sample_that_runs_is_handed_over_at_the_next_cut_that_is_asked_for(links: WorkerChannels) -> None:
    """At another one it would wait for a CPU worker: no device has a plan for it."""
    runs, go_on = threading.Event(), threading.Event()

    def gated(fields: Any, _: Any) -> Any:
        runs.set()
        assert go_on.wait(30)
        return _plus_one(fields, _)

    on_device = TorchFunction(_plus_one)
    stages = [Stage(f"{n}", ("x",), {"x": X}, _plus_one if n else gated, on_device) for n in range(3)]
    pipeline = Pipeline((READ, *stages), outputs=("x",))
    bench = Bench(links, job(lambda key: {"n": key}, pipeline=pipeline, cuts=pipeline.cuts))
    sources = [bench.store.put((pipeline.run({"n": 30}, 0, stop=1), None))]
    with bench.running(task(piece([30], sources=sources), chunk=8)) as reports:
        assert runs.wait(30)
        links.board.hand_over(1, 7, (2,))  # another one's
        links.board.hand_over(1, 8, (3, 70))  # no word has a bit for stage 70
        go_on.set()
    (item,) = reports[-1].items or []
    assert isinstance(item, Handed) and item.stage == 3
    (sample,) = values(bench, bench.run(task(piece([30], sources=[item]), chunk=9)))
    assert sample["x"].tolist() == [33.0] * 3, "no stage is applied twice"


@pytest.mark.parametrize("stage", [False, True], ids=["data set", "stage"])
def test_a_chunk_that_drew_is_done_again_and_the_first_try_leaves_nothing(links: WorkerChannels, stage: bool) -> None:
    """Content is as from chunks of one, also of samples before the first draw."""
    calls: list[int] = []

    def make(key: int) -> Any:
        calls.append(key)
        return {"draw": random.random() if key >= 13 else -1.0}

    what = job(make)
    if stage:
        made = Stage("make", ("n",), {"draw": Field(object)}, lambda fields, _: make(fields["n"]))
        what = job(lambda key: {"n": key}, pipeline=Pipeline((made,), outputs=("draw",)))
    bench, other = Bench(links, what), Bench(links, what, number=1)
    found = values(bench, bench.run(task(piece(range(30)))))
    assert len(calls) > 30, "the chunk was not tried without seeds first"
    alone = [values(other, other.run(task(piece([key], position=key), chunk=key + 2)))[0] for key in range(30)]
    assert found == alone
    assert bench.arena is not None and bench.arena.allocated == 30 * 4096


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("draws_too", [False, True])
def test_a_limit_stops_a_chunk_before_the_next_sample(links: WorkerChannels, pieces: int, draws_too: bool) -> None:
    """Also when the chunk is being done again because it drew."""
    calls: list[int] = []

    def make(key: int) -> Any:
        calls.append(key)
        if key == 9:
            bench.revoke(10)
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
    published, publish = list[int](), links.bell.publish

    def count(begin: int, took: Sequence[float], *rest: Any) -> None:
        published.append(len(took))
        publish(begin, took, *rest)

    monkeypatch.setattr(links.bell, "publish", count)
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


def progress_of(waited: list[float], times: list[float]) -> LeaseProgress:
    """Samples that took so long, of a task in which single waits are not told apart. ``waited``: seconds that its
    thread has waited for a core, whenever it is asked."""
    progress = LeaseProgress(task(piece(range(32))), iter(waited).__next__)
    assert not progress.delayed
    progress.times += times
    return progress


def test_what_a_worker_has_waited_is_taken_from_the_samples_that_took_longest() -> None:
    progress = progress_of([0.0, 4e-3], [1e-4] * 5 + [4.1e-3] + [1e-4] * 5)
    times, _, elapsed = progress.told()
    assert times == pytest.approx([1e-4] * 11)
    assert elapsed == pytest.approx(10 * 1e-4 + 4.1e-3)


def test_waits_that_were_told_are_not_told_again() -> None:
    progress = progress_of([0.0, 3e-3, 3e-3], [1e-4, 1e-4, 3.1e-3])
    assert progress.told()[0] == pytest.approx([1e-4] * 3)
    progress.times += [1e-4, 1e-4, 3.1e-3]
    assert progress.told()[0] == pytest.approx([1e-4, 1e-4, 3.1e-3])


def test_what_a_stage_draws_from_global_generators_is_the_same_wherever_the_sample_is_cut(
    links: WorkerChannels,
) -> None:
    x = Field(object)

    def drawing(fields: Any, _: Any) -> Any:
        return {"x": [*fields.get("x", ()), *draws()]}

    read = Stage("read", ("n",), {"x": x}, cpu=drawing)
    stages = [Stage(f"{n}", ("x",), {"x": x}, drawing, TorchFunction(drawing)) for n in range(3)]
    pipeline = Pipeline((read, *stages), outputs=("x",))
    plain = Bench(links, job(lambda key: {"n": draws()}, pipeline=pipeline))
    cut = Bench(links, job(lambda key: {"n": draws()}, pipeline=pipeline, cuts=pipeline.cuts), number=1)
    (whole,) = values(plain, plain.run(task(piece([5]))))
    assert len({*whole["x"]}) == len(whole["x"]), "stages draw the same"
    (read_,) = items_of(cut.run(task(piece([5]), kind="inspect", chunk=2)))
    for stop in (4, 2, 3):
        (item,) = items_of(cut.run(task(piece([5], sources=[read_.fields]), stop=stop, chunk=2 * stop)))
        if stop < 4:
            assert isinstance(item, Handed)
            (item,) = items_of(cut.run(task(piece([5], sources=[item]), chunk=2 * stop + 1)))
        assert cut.store.get(item) == whole
