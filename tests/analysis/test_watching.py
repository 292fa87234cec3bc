"""A data set with a clock before it is the data set that it was, and what workers note is what they did."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from minato_gpu import Field, Pipeline, Source, Stage
from minato_gpu.analysis.notes import NoteBook, plain_key
from minato_gpu.analysis.watching import Stopwatch, WatchedItems, watched, watched_pipeline


class Files:
    """Samples are files' bytes."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.told = ""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.fromfile(self.paths[index], np.uint8).astype(np.float32))

    def source(self, index: int) -> Source:
        return Source(self.paths[index])


class Several(Files):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.start = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, 10))


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    found = [tmp_path / f"{number}.bin" for number in range(8)]
    for number, path in enumerate(found):
        path.write_bytes(bytes([number]) * 5000)
    return [str(path) for path in found]


@pytest.fixture
def book(tmp_path: Path) -> NoteBook:
    (tmp_path / "notes").mkdir()
    return NoteBook(str(tmp_path / "notes"), "sight")


def test_workers_note_samples_files_and_bytes(paths: list[str], book: NoteBook) -> None:
    watch = Stopwatch(book, looks=True)
    dataset = watched(Files(paths), watch)
    collate = watch.collating(default_collate)
    loader: DataLoader[Any] = DataLoader(dataset, 2, num_workers=2, collate_fn=collate)
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    samples, batches = book.read()
    assert sorted(seen.key for seen in samples) == list(range(8))
    for seen in samples:
        assert seen.opened.files == (paths[seen.key],)
        assert seen.opened.nbytes == 5000 and seen.opened.requests == 1
        assert seen.seconds >= seen.cpu_s > 0
    assert [batch.samples for batch in batches] == [2] * 4


def test_samples_that_come_together_share_their_time(paths: list[str], book: NoteBook) -> None:
    dataset = watched(Several(paths), Stopwatch(book, looks=True))
    assert isinstance(dataset, WatchedItems)
    loader: DataLoader[Any] = DataLoader(dataset, 4)  # type: ignore[arg-type]
    assert len(list(loader)) == 2
    samples, _ = book.read()
    assert len(samples) == 8 and {seen.opened.nbytes for seen in samples} == {5000.0}
    assert len({seen.seconds for seen in samples}) == 2


def test_what_reads_nothing_has_no_files(book: NoteBook) -> None:
    dataset = watched([1, 2, 3], Stopwatch(book, looks=True))
    assert [dataset[number] for number in range(3)] == [1, 2, 3]
    samples, _ = book.read()
    assert [(seen.opened.files, seen.opened.nbytes) for seen in samples] == [((), None)] * 3


def test_a_file_that_stays_open_is_found(paths: list[str], book: NoteBook) -> None:
    with Path(paths[0]).open("rb", buffering=0) as file:
        dataset = watched(_OfOne(file), Stopwatch(book, looks=True))
        assert dataset[10] == 10 * b"\0"
    samples, _ = book.read()
    assert paths[0] in samples[0].opened.files and samples[0].opened.nbytes == 10


class _OfOne:
    def __init__(self, file: Any) -> None:
        self.file = file

    def __getitem__(self, count: int) -> bytes:
        data: bytes = self.file.read(count)
        return data


def test_attributes_are_those_of_the_data_set(paths: list[str], book: NoteBook) -> None:
    own = Files(paths)
    dataset = watched(own, Stopwatch(book, looks=False))
    dataset.told = "by a worker_init_fn"
    assert own.told == dataset.told == "by a worker_init_fn"
    assert len(dataset) == 8 and dataset.paths is own.paths
    assert dataset.source(3) == Source(paths[3])
    assert watched(Subset(own, [5]), Stopwatch(book, looks=False)).source(0) == Source(paths[5])  # type: ignore[arg-type]
    assert not hasattr(dataset, "__getitems__") and not hasattr(watched([1], Stopwatch(book, looks=False)), "source")
    again = pickle.loads(pickle.dumps(dataset))
    assert again[1].equal(own[1]) and again.told == own.told


def test_a_stream_is_watched(book: NoteBook) -> None:
    own = Stream()
    dataset = watched(own, Stopwatch(book, looks=False))
    dataset.start = 4
    assert isinstance(dataset, IterableDataset) and [int(one) for one in DataLoader(dataset, None)] == list(
        range(4, 10)
    )
    assert len(book.read()[0]) == 6


def test_an_error_is_the_samples_own(book: NoteBook) -> None:
    dataset = watched([1], Stopwatch(book, looks=True))
    with pytest.raises(IndexError, match="out of range"):
        dataset[7]
    assert dataset[0] == 1
    assert [seen.key for seen in book.read()[0]] == [0]


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


def test_notes_that_were_cut_off_are_left_out(book: NoteBook) -> None:
    book.leave("items", 1.0, ["a", 2], 0.5, 0.25, [[], None, None])
    path = next(Path(book.folder).iterdir())
    with path.open("ab") as file:
        file.write(b'["items", 2.0, ["b"')
    samples, batches = book.read()
    assert [(seen.key, seen.seconds) for seen in samples] == [("a", 0.25), (2, 0.25)] and batches == []


def test_keys_are_plain() -> None:
    assert [plain_key(key) for key in (3, "a", np.int64(4), (1, "b"))] == [3, "a", 4, "(1, 'b')"]
