"""A data set that takes the place of another in a directory: it is kept, once it has been read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minato_gpu.sources.disk import LEAST_BUDGET
from tests.contracts.cached import Files, close, loader_of, of_tier, rows
from tests.sources.disk.content import elsewhere

SIZE = 100_000
OLD, NEW = 60, 25


def _written(folder: Path, samples: int, seed: int) -> Files:
    folder.mkdir()
    for key in range(samples):
        np.random.default_rng((seed, key)).integers(0, 256, SIZE, np.uint8).tofile(folder / f"{key}.bin")
    return Files(folder, samples)


@pytest.mark.usefixtures("written_at_once")
@pytest.mark.parametrize("overlap", [False, True], ids=["fresh", "overlapping"])
def test_copies_of_a_run_that_has_ended_make_room(tmp_path: Path, overlap: bool) -> None:
    old, new = _written(tmp_path / "old", OLD, 0), _written(tmp_path / "new", NEW, 1)
    cache = tmp_path / "cache"

    def run_before() -> None:
        loader = loader_of(old, {"disk": LEAST_BUDGET}, cache)
        assert len(rows(loader)) == OLD
        close(loader)

    assert elsewhere(run_before)
    loader = loader_of(new, {"disk": LEAST_BUDGET}, cache, epochs=5 if overlap else None)
    hits, evicted = [], []
    for _ in range(5):
        assert len(rows(loader)) == NEW
        hits.append(of_tier(loader, "disk")["hits"])
        evicted.append(of_tier(loader, "disk")["evicted"])
    close(loader)
    counts = of_tier(loader, "disk")  # what it tells last is whole
    if overlap:
        assert counts["written"] >= NEW // 2, "epochs overlap, and have reads in common"
        assert counts["evicted"] > 0 < counts["hits"]
    else:
        assert (hits[0], evicted[0]) == (0, 0)
        assert evicted[1] > 0
        assert hits[4] == NEW
