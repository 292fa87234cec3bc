"""What a script under analysis sees: its data set, its batches, files and ranks; and what is noted of them."""

from __future__ import annotations

import pickle
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, default_collate

import minato_gpu
from minato_gpu import Field, Pipeline, Stage
from minato_gpu.lab.analysis import standalone
from minato_gpu.lab.analysis.ranks import Lockstep, Ranks
from minato_gpu.lab.analysis.standalone import Level
from minato_gpu.lab.analysis.stopwatch import NoteBook, Stopwatch, Watched, watched, watched_pipeline
from minato_gpu.lab.analysis.subject import Subject
from tests.contracts.datasets import Sourced


@pytest.fixture
def book(tmp_path: Path) -> NoteBook:
    (tmp_path / "notes").mkdir()
    return NoteBook(str(tmp_path / "notes"), "sight")


def test_attributes_are_those_of_the_data_set(book: NoteBook) -> None:
    own: Any = Sourced(8, str)
    watch = Stopwatch(book, looks=False)
    dataset = watched(own, watch)
    dataset.told = "by a worker_init_fn"
    assert own.told == dataset.told == "by a worker_init_fn"
    assert len(dataset) == 8 and dataset.source(3) == watched(Subset(own, [5]), watch).source(0) == own.source(3)
    assert not hasattr(dataset, "__getitems__") and not hasattr(watched([1], watch), "source")
    again = pickle.loads(pickle.dumps(dataset))
    assert again[1] == own[1] == "1" and again.told == own.told


def test_stages_belong_to_their_sample(book: NoteBook) -> None:
    stages = [
        Stage("double", reads=("x",), writes={"y": Field(np.int64)}, cpu=lambda fields, _: {"y": fields["x"] * 2}),
        Stage("add", reads=("y",), writes={"z": Field(np.int64)}, cpu=lambda fields, _: {"z": fields["y"] + 1}),
    ]
    watch = Stopwatch(book, looks=False)
    pipeline = watched_pipeline(Pipeline(stages, outputs=("z",)), watch)  # type: ignore[arg-type]
    dataset = watched([{"x": np.int64(4)}, {"x": np.int64(5)}], watch)
    assert [int(pipeline.run(dataset[number], 0)["z"]) for number in range(2)] == [9, 11]
    samples, _ = book.read()
    assert [list(seen.stages) for seen in samples] == [["double", "add"]] * 2
    assert all(seen.seconds >= sum(seen.stages.values()) for seen in samples)


# --- loaders like the script's ----------------------------------------------------------------------------------------


def tenfold(samples: list[int]) -> Any:
    return default_collate([10 * sample for sample in samples])


def _values(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_the_same_batches_again(loader_class: Any, tmp_path: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    loader = loader_class(list(range(10)), 4, shuffle=True, generator=generator, collate_fn=tenfold)
    subject = Subject(loader, str(tmp_path))
    assert [len(keys) for keys in subject.keys] == [4, 4, 2]
    drawn = [[10 * key for key in keys] for keys in subject.keys]
    state = generator.get_state()
    assert _values(subject.like()) == _values(subject.like("warm")) == drawn
    assert _values(subject.like(batches=subject.keys[1:])) == drawn[1:]
    assert generator.get_state().equal(state)  # loaders like it draw nothing of the script's own
    assert (subject.samples, subject.length, subject.batch_size) == (10, 3, 4)
    assert subject.is_followed_by(loader) and not subject.is_followed_by(subject.like()), "that is the analysis' own"
    assert subject.kind == ("torch" if loader_class is DataLoader else "minato_gpu")


def test_arguments_are_kept_but_for_what_stays(tmp_path: Any) -> None:
    kind: Any = minato_gpu.DataLoader
    loader = kind(
        list(range(8)), 2, num_workers=2, in_order=False, max_lateness=3, on_error="skip", persistent_workers=True
    )
    subject = Subject(loader, str(tmp_path))
    like: Any = subject.like("warm")
    assert (like.num_workers, like.in_order, like.max_lateness, like.on_error) == (2, False, 3, "skip")
    assert not like.persistent_workers and isinstance(like.dataset, Watched)
    assert like.collate_fn is default_collate  # ours stacks samples by itself where it knows that they are only stacked
    assert subject.like(workers=1).num_workers == 1
    torch_class: Any = DataLoader
    torchs: Any = Subject(torch_class(list(range(8)), 2), str(tmp_path)).like("warm")
    assert torchs.collate_fn.args == (default_collate,) and torchs.collate_fn is not default_collate


# --- what storage gives -----------------------------------------------------------------------------------------------


def test_rate_and_latency_are_told_apart() -> None:
    """Storage of 100 MB/s and 50 ms: one read of 1 MB takes 60 ms, and from six at once on the rate is the limit."""
    levels = [Level(n, max(0.06, n * 0.01), 1e6, min(n * 1e6 / 0.06, 1e8)) for n in (1, 2, 4, 8, 16)]
    rate, latency = standalone.rate_and_latency(levels)
    assert rate == pytest.approx(1e8) and latency == pytest.approx(0.05)
    far = [Level(n, 0.05, 1e5, n * 1e5 / 0.05) for n in (1, 8)]
    assert standalone.rate_and_latency(far) == (1.6e7, 0.05)  # eight at once do not reach the limit
    assert standalone.rate_and_latency([Level(1, 0.01, 1e6, 1e8)]) == (1e8, 0.0)
    busy = [Level(1, 2e-5, 1e4, 1e6), Level(8, 4e-5, 1e4, 8e6)]  # with preparation: storage is idle nearly always
    assert standalone.rate_and_latency(busy) == pytest.approx((2e9, 2e-5))


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_a_rank_whose_leader_has_gone_raises(tmp_path: Path) -> None:
    ticks = count(step=40)
    second = Lockstep(tmp_path, 1, 2, lambda: float(next(ticks)))
    with pytest.raises(TimeoutError, match="rank 0, which decides when a phase ends, has not answered"):
        second.agreed(True)
    second.close()


def test_ranks_meet_in_one_private_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    second = Ranks.of_environment()
    assert second == Ranks(1, 2)
    with Ranks(0, 2).folder() as first, second.folder() as other:
        assert first == other and first.stat().st_mode & 0o777 == 0o700
        assert first.exists()
    assert not first.exists()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="2 of 4 ranks are on other hosts"):
        Ranks.of_environment()
