"""The manual's example of Ray Data runs and delivers every row once in each epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import pages

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::UserWarning"),
]


def test_rows_of_ray_data(tmp_path: Path) -> None:
    data = pytest.importorskip("ray.data")
    if not (was_there := ray.is_initialized()):
        ray.init(num_cpus=2, log_to_driver=False)
    try:
        names: dict[str, Any] = {"rows": data.range(100)}
        [example] = pages.examples("minato_gpu/manual/ray_data.md")
        pages.run(example, names, tmp_path)
        assert names["loader"].stats()["samples_delivered"] == 100
        for _ in range(2):
            assert sorted(int(key) for batch in names["loader"] for key in batch["id"]) == list(range(100))
    finally:
        if not was_there:
            ray.shutdown()
