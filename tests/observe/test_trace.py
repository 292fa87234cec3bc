"""Traces: every sample's life in them, bounded in bytes, and never in the way of training."""

from __future__ import annotations

import gc
import json
import logging
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from minato_gpu import DataLoader
from minato_gpu.observe import facts as f
from minato_gpu.observe.trace import Trace, TraceFile, write_trace
from tests.contracts.datasets import Made
from tests.support.concurrency import said_by_a_child

NUMBERS: Any = list(range(400))
COSTLY = Made(12, lambda key: key + 0 * sum(range(200_000)))  # some milliseconds of computing each


@dataclass
class Slice:
    """Something that lasted; times in microseconds. ``made_of``: positions of the work that arrows lead from."""

    name: str
    begin: float
    end: float
    values: dict[str, float]
    made_of: list[float] = field(default_factory=list)


@dataclass
class Found:
    """By name of their track; ``counts``: the values of the counter, in order of time."""

    slices: dict[str, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    counts: list[int] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    @property
    def work(self) -> list[Slice]:
        """What slots prepared; not what they read for another lane, nor the batches that they joined."""
        slices = [each for slices in self.slices.values() for each in slices]
        return [each for each in slices if each.name in ("sample", "samples")]

    @property
    def batches(self) -> list[Slice]:
        """As the training loop got them: its steps."""
        return [each for each in self.slices["training loop"] if each.name == "step"]


def read(path: Path) -> Found:
    """Reads a trace back. Raises AssertionError where it breaks a rule that holds of every trace."""
    text = path.read_text(encoding="utf-8")
    events: list[dict[str, Any]] = json.loads(text if text.endswith("]\n") else f"{text}]")  # it may go on yet
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert len({event["pid"] for event in events}) == 1
    found, under_way, arrows = Found(), defaultdict[int, list[Slice]](list), dict[int, dict[str, Any]]()
    for event in sorted((event for event in events if event["ph"] != "M"), key=lambda event: event["ts"]):
        kind, at, track = event["ph"], event["ts"], event.get("tid", 0)
        made = Slice(event["name"], at, at + event.get("dur", 0.0), event.get("args", {}))
        if kind == "B":
            under_way[track].append(made)
        elif kind == "E":
            done = under_way[track].pop()  # there is no end without a beginning
            done.end = at
            found.slices[names[track]].append(done)
        elif kind == "X":
            found.slices[names[track]].append(made)
        elif kind == "C":
            found.counts.append(event["args"]["samples"])
        elif kind == "s":
            arrows[event["id"]] = event
        elif kind == "f":
            begin = arrows.pop(event["id"])
            of = [each for each in found.slices[names[begin["tid"]]] if each.begin <= begin["ts"] <= each.end]
            under_way[track][-1].made_of.append(of[0].values["position"])
        else:
            assert kind == "i"
    assert len(arrows) <= 1  # where there was no room for the last one's end
    found.open = [each.name for stack in under_way.values() for each in stack]
    return found


# --- traces of loaders --------------------------------------------------------------------------------------------


def traced(path: Path, dataset: Any, times: int = 1, **arguments: Any) -> Found:
    loader: Any = DataLoader(dataset, 4, trace=path, **arguments)
    for _ in range(times):
        for _ in loader:
            pass
    return read(path)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize(("in_order", "persists"), [(True, False), (False, True)])
@pytest.mark.parametrize("data", [list(range(26)), COSTLY], ids=["cheap", "costly"])
def test_every_sample_is_there(tmp_path: Path, workers: int, in_order: bool, persists: bool, data: Any) -> None:
    epochs = 2 if persists else None  # workers stay for as many, and none is prepared beyond them
    more = {"num_workers": workers, "in_order": in_order, "epochs": epochs}
    found = traced(tmp_path / "run.json", data, 2, **more)
    assert sum(each.values["samples"] for each in found.work) == 2 * len(data)
    sizes = [4] * (len(data) // 4) + [2] * (len(data) % 4 > 0)
    assert [each.values["samples"] for each in found.batches] == 2 * sizes
    assert [each.name for each in found.slices["epochs"]] == ["epoch 0", "epoch 1"] and not found.open
    assert len(found.counts) == len(found.batches)
    assert found.counts[-1] == 0 and min(found.counts) >= 0
    waits = {each.name for each in found.slices["training loop"]} - {"step"}
    assert all(name.startswith("wait: ") for name in waits)


def test_an_epoch_that_is_left_ends_where_the_next_begins(tmp_path: Path) -> None:
    loader: Any = DataLoader(NUMBERS[:40], 4, num_workers=1, trace=tmp_path / "run.json")
    for _ in loader:
        break
    for _ in loader:
        pass
    found = read(tmp_path / "run.json")
    first, second = found.slices["epochs"]
    assert first.end == second.begin and not found.open
    assert len(found.batches) == 11 and found.counts[-1] == 0


def test_it_takes_no_more_bytes_than_it_may(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.json"
    with caplog.at_level(logging.WARNING, "minato_gpu"):
        loader: Any = DataLoader(NUMBERS, 4, num_workers=1)
        write_trace(loader._session.facts, path, loader, 16_000)
        assert sum(len(batch) for batch in loader) == sum(len(batch) for batch in loader) == 400
    assert 15_000 < path.stat().st_size <= 16_000
    assert read(path).batches and caplog.text.count("what happens from now on is not in it") == 1


def test_two_that_are_written_at_once_have_names_of_their_own(tmp_path: Path) -> None:
    loaders = [DataLoader(NUMBERS[:8], 4, trace=tmp_path / "run.json") for _ in range(3)]
    for loader in loaders:
        assert len(list(loader)) == 2
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["run-2.json", "run-3.json", "run.json"]
    assert all(len(read(path).batches) == 2 for path in tmp_path.iterdir())
    del loader, loaders
    gc.collect()
    assert len(traced(tmp_path / "run.json", list(range(4))).batches) == 1  # it is free again, and begins anew


def test_a_process_that_was_forked_writes_nothing(tmp_path: Path) -> None:
    loader: Any = DataLoader(NUMBERS[:8], 4, trace=tmp_path / "run.json")
    kept = [loader, iter(loader)]
    del loader
    next(kept[1])

    def child() -> tuple[int, int]:
        came = len(next(kept[1])), len(list(kept[0]))
        kept.clear()
        gc.collect()
        return came

    assert said_by_a_child(child) == (4, 2)
    assert len(list(kept[1])) == 1
    assert len(read(tmp_path / "run.json").batches) == 2


@pytest.mark.parametrize(
    ("trace", "kind", "said"),
    [
        (3, TypeError, "trace must be a path"),
        ({"path": "run"}, TypeError, "trace must be a path"),
        ("/nowhere/run.json", ValueError, "cannot be written"),
        (".", ValueError, "cannot be written"),
    ],
)
def test_bad_arguments_fail_at_construction(trace: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        DataLoader(NUMBERS, trace=trace)


def told(path: Path, *facts: f.Fact) -> Found:
    """The trace of these."""
    file = TraceFile(path, 1 << 20)
    trace = Trace(file, "made up", lambda: None)
    for fact in facts:
        trace(fact)
    file.close()
    return read(path)


def worked(position: int, samples: int, begin: float, end: float, worker: int = 0) -> f.Worked:
    positions = [(position, position + samples)]
    return f.Worked(0, "cpu", worker, positions, samples, begin - 0.5, begin, end, None, True, 0)


def delivered(number: int, at: float, *positions: tuple[int, int]) -> f.BatchDelivered:
    return f.BatchDelivered(0, at, number, sum(hi - lo for lo, hi in positions), 0, 0.0, positions)


def test_work_for_two_batches_has_an_arrow_to_each(tmp_path: Path) -> None:
    found = told(
        tmp_path / "run.json",
        worked(0, 3, 1.0, 2.0),
        worked(6, 2, 1.0, 2.0, worker=1),
        worked(3, 3, 2.0, 3.0),
        delivered(0, 4.0, (0, 4)),
        delivered(1, 5.0, (4, 8)),
        f.BatchAsked(0, 6.0),
    )
    assert [sorted(batch.made_of) for batch in found.batches] == [[0, 3], [3, 6]]


def test_what_was_ready_of_an_epoch_that_was_left_is_gone(tmp_path: Path) -> None:
    found = told(
        tmp_path / "run.json",
        f.EpochBegan(0, 0.0, 8),
        worked(0, 8, 1.0, 2.0),
        delivered(0, 3.0, (0, 4)),
        f.EpochBegan(1, 4.0, 8),
        worked(0, 4, 5.0, 6.0),
        delivered(0, 7.0, (0, 4)),
        f.EpochEnded(1, 8.0),
    )
    assert found.counts == [4, 0] and [each.name for each in found.slices["epochs"]] == ["epoch 0", "epoch 1"]
