"""Traces: every sample's life in them, in Perfetto's format, bounded in bytes, and never in the way of training."""

from __future__ import annotations

import errno
import gc
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from minato_gpu import DataLoader, Source
from minato_gpu.observe import facts as f
from minato_gpu.observe.trace import Trace
from minato_gpu.observe.trace_file import TraceFile
from tests.observe.traces import Found, read

from .test_facts import Costly, Fails

NUMBERS: Any = list(range(400))


class Streams(IterableDataset[int]):
    """Ten numbers."""

    def __iter__(self) -> Any:
        return iter(range(10))


def traced(path: Path, dataset: Any, times: int = 1, **arguments: Any) -> Found:
    loader: Any = DataLoader(dataset, 4, trace=path, **arguments)
    for _ in range(times):
        for _ in loader:
            pass
    return read(path)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(("in_order", "persists"), [(True, False), (False, True)])
@pytest.mark.parametrize("data", [list(range(26)), Costly()], ids=["cheap", "costly"])
def test_every_sample_is_there(tmp_path: Path, workers: int, in_order: bool, persists: bool, data: Any) -> None:
    epochs = 2 if persists else None  # workers stay for as many, and none is prepared beyond them
    more = {"num_workers": workers, "in_order": in_order, "epochs": epochs}
    found = traced(tmp_path / "run.pftrace", data, 2, **more)
    assert sum(each.values["samples"] for each in found.work) == 2 * len(data)
    sizes = [4] * (len(data) // 4) + [2] * (len(data) % 4 > 0)
    assert [each.values["samples"] for each in found.batches] == 2 * sizes
    assert [each.name for each in found.slices["epochs"]] == ["epoch 0", "epoch 1"] and not found.open
    assert len(found.counts) == len(found.batches)
    assert found.counts[-1] == 0 and min(found.counts) >= 0
    waits = {each.name for each in found.slices["training loop"]} - {"step"}
    assert all(name.startswith("wait: ") for name in waits)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_arrow_leads_from_each_sample_to_its_batch(tmp_path: Path, workers: int) -> None:
    found = traced(tmp_path / "run.pftrace", Costly(), num_workers=workers)
    assert {each.values["samples"] for each in found.work} <= ({4} if workers == 0 else {1, 2, 3, 4})
    sources: dict[int, set[int]] = {}
    for each in found.work:
        first, count = int(each.values["position"]), int(each.values["samples"])
        (arrow,) = each.flows
        sources.setdefault(arrow, set()).update(range(first, first + count))
    for number, batch in enumerate(found.batches):
        assert len(batch.flows) == len(set(batch.flows))
        assert set(range(4 * number, 4 * number + 4)) <= set().union(*(sources[arrow] for arrow in batch.flows))
        assert all(sources[arrow] & set(range(4 * number, 4 * number + 4)) for arrow in batch.flows)
    assert sorted(n for each in sources.values() for n in each) == list(range(12))


class Stored(Costly):
    """Whose bytes are read ahead."""

    def source(self, index: int) -> Source:
        return Source(__file__, index, 1)


@pytest.mark.parametrize("reads", [False, True])
def test_what_was_before_the_work_is_told(tmp_path: Path, reads: bool) -> None:
    found = traced(tmp_path / "run.pftrace", Stored() if reads else Costly(), 2, num_workers=2)
    for each in found.work:
        assert each.values["drawn_ms_before"] >= each.values["queued_ms"]
        assert ("fetched_ms_before" in each.values) == reads
        if reads:
            assert each.values["drawn_ms_before"] >= each.values["fetched_ms_before"] >= 0.0


def test_the_youngest_bytes_of_a_chunk_are_told_and_forgotten(tmp_path: Path) -> None:
    found = told(
        tmp_path / "run.pftrace",
        f.Drew(0, 0.0, (0, 4)),
        f.Drew(0, 0.5, (4, 8)),
        f.Fetched(0, 0.25, [0, 1, 2, 5]),
        f.Fetched(0, 0.75, [3, 4]),
        worked(0, 4, 1.0, 2.0),
        worked(4, 2, 2.0, 3.0),
        worked(4, 2, 4.0, 5.0),  # again, after a worker's death
    )
    before = [(each.values["drawn_ms_before"], each.values.get("fetched_ms_before")) for each in found.work]
    assert before == [(1000.0, 250.0), (1500.0, 1250.0), (3500.0, None)]


def test_streams_are_traced_by_the_batch(tmp_path: Path) -> None:
    found = traced(tmp_path / "run.pftrace", Streams(), num_workers=1)
    assert [each.values["samples"] for each in found.batches] == [4, 4, 2]
    assert len(found.work) >= 3


def test_an_epoch_that_is_left_ends_where_the_next_begins(tmp_path: Path) -> None:
    loader: Any = DataLoader(NUMBERS[:40], 4, num_workers=1, trace=tmp_path / "run.pftrace")
    for _ in loader:
        break
    for _ in loader:
        pass
    found = read(tmp_path / "run.pftrace")
    first, second = found.slices["epochs"]
    assert first.end == second.begin and not found.open
    assert len(found.batches) == 11 and found.counts[-1] == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_failures_are_there(tmp_path: Path, workers: int) -> None:
    found = traced(tmp_path / "run.pftrace", Fails(range(12)), num_workers=workers, on_error="skip")
    (failed,) = (each for each in found.instants["training loop"] if each.name == "failed samples")
    assert (failed.values["samples"], found.counts[-1]) == (1, 0) and min(found.counts) >= 0


def test_it_takes_no_more_bytes_than_it_may(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.pftrace"
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        loader: Any = DataLoader(NUMBERS, 4, num_workers=1, trace={"path": path, "bytes": "4kB"})
        assert sum(len(batch) for batch in loader) == sum(len(batch) for batch in loader) == 400
    assert 3_000 < path.stat().st_size <= 4_000
    assert read(path).batches and caplog.text.count("what happens from now on is not in it") == 1


def test_two_that_are_written_at_once_have_names_of_their_own(tmp_path: Path) -> None:
    loaders = [DataLoader(NUMBERS[:8], 4, trace=tmp_path / "run.pftrace") for _ in range(3)]
    for loader in loaders:
        assert len(list(loader)) == 2
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["run-2.pftrace", "run-3.pftrace", "run.pftrace"]
    assert all(len(read(path).batches) == 2 for path in tmp_path.iterdir())
    del loader, loaders
    gc.collect()
    assert len(traced(tmp_path / "run.pftrace", list(range(4))).batches) == 1  # it is free again, and begins anew


def test_a_process_that_was_forked_writes_nothing(tmp_path: Path) -> None:
    loader: Any = DataLoader(NUMBERS[:8], 4, trace=tmp_path / "run.pftrace")
    batches = iter(loader)
    next(batches)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            next(batches)
            list(loader)
            del loader, batches
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(batches)) == 1
    assert len(read(tmp_path / "run.pftrace").batches) == 2


def test_a_full_disk_ends_the_trace_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(file: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    loader: Any = DataLoader(NUMBERS[:8], 4, trace=tmp_path / "run.pftrace")
    batches = iter(loader)
    monkeypatch.setattr("minato_gpu.observe.trace_file.os.write", write)
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        assert len(list(batches)) == len(list(loader)) == 2
    monkeypatch.undo()
    assert "No space left" in caplog.text and caplog.text.count("hears nothing more") == 1


def test_packets_larger_than_a_byte_can_say_are_written(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "run.pftrace", 1 << 20)
    packet = file.packet()
    packet.track_descriptor.uuid = 1
    packet.track_descriptor.process.process_name = "n" * 300
    assert file.write(packet)
    file.close()
    file.close()
    read(tmp_path / "run.pftrace")


@pytest.mark.parametrize(
    ("trace", "kind", "said"),
    [
        (3, TypeError, "trace must be a path"),
        ({"bytes": 3}, ValueError, "name 'path'"),
        ({"path": "run", "size": 3}, ValueError, "name 'path'"),
        ({"path": "run", "bytes": 0}, ValueError, "trace must be at least 1 byte"),
        ({"path": "run", "bytes": 300}, ValueError, "trace: a file takes at least 4000 bytes, got 300; pass more"),
        ({"path": "run", "bytes": "many"}, ValueError, "trace='many' is no number of bytes"),
        ("/nowhere/run.pftrace", ValueError, "cannot be written"),
        (".", ValueError, "cannot be written"),
    ],
)
def test_bad_arguments_fail_at_construction(trace: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        DataLoader(NUMBERS, trace=trace)


def told(path: Path, *facts: f.Fact) -> Found:
    """The trace of these."""
    file = TraceFile(path, 1 << 20)
    trace = Trace(file, "made up", 1, lambda: None)
    for fact in facts:
        trace(fact)
    file.close()
    return read(path)


def worked(position: int, samples: int, begin: float, end: float, worker: int = 0, ends: Any = None) -> f.Worked:
    positions = [(position, position + samples)]
    return f.Worked(0, "cpu", worker, positions, samples, begin - 0.5, begin, end, ends, True, 0)


def delivered(number: int, at: float, *positions: tuple[int, int]) -> f.Delivered:
    return f.Delivered(0, at, number, sum(hi - lo for lo, hi in positions), 0, 0.0, positions)


def test_work_for_two_batches_has_an_arrow_to_each(tmp_path: Path) -> None:
    found = told(
        tmp_path / "run.pftrace",
        worked(0, 3, 1.0, 2.0),
        worked(6, 2, 1.0, 2.0, worker=1),
        worked(3, 3, 2.0, 3.0),
        delivered(0, 4.0, (0, 4)),
        delivered(1, 5.0, (4, 8)),
        f.Asked(0, 6.0),
    )
    arrow = {each.values["position"]: each.flows[0] for each in found.work}
    assert [batch.flows for batch in found.batches] == [
        sorted([arrow[0], arrow[3]]),
        sorted([arrow[3], arrow[6]]),
    ]


def test_batches_out_of_order_find_their_work(tmp_path: Path) -> None:
    found = told(
        tmp_path / "run.pftrace",
        worked(0, 10, 1.0, 2.0),
        delivered(0, 3.0, (2, 4), (7, 9)),
        delivered(1, 4.0, (0, 2), (9, 10)),
        delivered(2, 5.0, (4, 7)),
        f.Asked(0, 6.0),
    )
    ((arrow,),) = (each.flows for each in found.work)
    assert [batch.flows for batch in found.batches] == [[arrow]] * 3
    assert found.counts == [6, 3, 0]


def test_work_of_two_lanes_on_the_same_samples_has_an_arrow_from_each(tmp_path: Path) -> None:
    found = told(
        tmp_path / "run.pftrace",
        worked(0, 4, 1.0, 2.0)._replace(handed=4),
        worked(4, 4, 2.0, 3.0)._replace(handed=4),
        worked(0, 8, 3.0, 4.0)._replace(lane="gpu"),
        delivered(0, 5.0, (0, 6)),
        delivered(1, 6.0, (6, 8)),
        f.Asked(0, 7.0),
    )
    first, second, device = sorted(arrow for each in found.work for arrow in each.flows)
    assert [batch.flows for batch in found.batches] == [[first, second, device], [second, device]]


def test_what_was_ready_of_an_epoch_that_was_left_is_gone(tmp_path: Path) -> None:
    found = told(
        tmp_path / "run.pftrace",
        f.Began(0, 0.0, 8, {"cpu": 1}),
        worked(0, 8, 1.0, 2.0),
        delivered(0, 3.0, (0, 4)),
        f.Began(1, 4.0, 8, {"cpu": 1}),
        worked(0, 4, 5.0, 6.0),
        delivered(0, 7.0, (0, 4)),
        f.Ended(1, 8.0),
    )
    assert found.counts == [4, 0] and [each.name for each in found.slices["epochs"]] == ["epoch 0", "epoch 1"]


def test_work_of_a_slot_that_overlaps_has_a_row_of_its_own(tmp_path: Path) -> None:
    """As micro-batches of a device do; clocks that differ by microseconds are no overlap."""
    found = told(tmp_path / "run.pftrace", worked(0, 1, 1.0, 3.0), worked(1, 1, 2.0, 4.0), worked(2, 1, 2.999990, 5.0))
    assert sorted((each.begin, each.end) for each in found.work) == [
        (10**9, 3 * 10**9),
        (2 * 10**9, 4 * 10**9),
        (3 * 10**9, 5 * 10**9),
    ]


def test_costly_samples_of_a_chunk_are_slices_of_their_own(tmp_path: Path) -> None:
    found = told(tmp_path / "run.pftrace", worked(4, 4, 1.0, 4.0, ends=[2.0, 2.0, 3.0, 4.0]))
    assert [(each.values["position"], each.values["samples"]) for each in found.work] == [(4, 2), (6, 1), (7, 1)]
