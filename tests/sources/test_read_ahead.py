"""A loader whose data set declares its sources: everything comes as without, and workers wait for no storage."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minato_gpu import DataLoader, Source, read_bytes
from tests.contracts.cached import SAMPLES, Files, loader_of, rows, write_files
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")

GONE = SAMPLES // 10  # files that the page cache may have let go of before they are used, on a machine short of memory


class Declares(Files):
    """Reads its samples' files, whatever ``source`` says of a key."""

    def __init__(self, folder: Path, source: Callable[[int], Source]) -> None:
        super().__init__(folder)
        self.source = source  # type: ignore[method-assign, assignment]

    def __getitem__(self, key: Any) -> Any:
        return key, int(read_bytes(self.folder / f"{key}.bin").sum())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


def reads(loader: DataLoader[Any]) -> dict[str, Any]:
    found: dict[str, Any] = loader.stats()["reads"]
    return found


def test_a_sample_is_not_begun_before_its_bytes_are_there(root: Path) -> None:
    """A named pipe in the place of a file is read once somebody writes; all other samples of the window are done."""
    late = root / "late"
    os.mkfifo(late)
    files: Any = Declares(root, lambda key: Source(str(root / f"{key}.bin" if key else late), 0, None if key else 4))
    loader: DataLoader[Any] = DataLoader(files, 4, num_workers=2, prefetch_factor=4)
    iterator = iter(loader)
    assert wait_until(lambda: iterator._engine.log.lanes["cpu"].samples == 31), "all others of the window"
    assert iterator._engine.pump.run.scheduler.stall_cause() == "fetch"
    with late.open("wb") as pipe:
        pipe.write(b"1234")
    assert [row[0] for row in rows(iterator)] == list(range(SAMPLES))
    found = reads(loader)
    assert 1 <= found["by_workers"] <= 1 + GONE, "it read the file itself, which was not what had been declared"
    assert found["workers_idle_s"] > 0
    late.unlink()


def test_a_declaration_that_raises_is_said_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    def source(key: int) -> Source:
        if key % 3 == 0:
            raise KeyError(key)
        return Source(str(root / f"{key}.bin"))

    with caplog.at_level(logging.WARNING, "minato_gpu"):
        loader = loader_of(Declares(root, source))
        got = rows(loader)
    assert sorted(row[0] for row in got) == list(range(SAMPLES))
    assert caplog.text.count("is not read ahead") == 1
    assert 0 <= reads(loader)["by_workers"] - SAMPLES // 3 <= GONE


def test_what_a_sampler_raises_comes_where_it_came_without_reading_ahead(root: Path) -> None:
    """Although the sampler is drawn from long before."""

    class Ends:
        def __iter__(self) -> Any:
            yield from range(40)
            raise OSError("the index server is away")

        def __len__(self) -> int:
            return SAMPLES

    def got(dataset: Any) -> int:
        batches: list[Any] = []
        with pytest.raises(OSError, match="the index server is away"):
            batches.extend(iter(DataLoader(dataset, 4, sampler=Ends(), num_workers=2)))
        return len(batches)

    assert got(Files(root)) == got(range(SAMPLES))
