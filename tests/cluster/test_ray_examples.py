"""The manual's examples of Ray Train and Ray Data run, and do what the page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import QUIET, agents
from tests.support import pages
from tests.support.waiting import wait_until

ray = pytest.importorskip("ray")
pytestmark = QUIET
TRAIN, DATA = pages.examples("minato_gpu/manual/ray.md")


def test_two_workers_of_ray_train(nodes: Any, tmp_path: Path) -> None:
    names: dict[str, Any] = {"folder": str(tmp_path)}
    pages.run(TRAIN, names, tmp_path)
    assert names["loss"] < 1e-3
    assert [node["connected"] for node in names["nodes"].values()] == [True]
    assert wait_until(lambda: agents() == [])


def test_rows_of_ray_data(nodes: Any, tmp_path: Path) -> None:
    data = pytest.importorskip("ray.data")
    names: dict[str, Any] = {"rows": data.range(100)}
    pages.run(DATA, names, tmp_path)
    assert names["loader"].stats()["samples_delivered"] == 100
    assert sorted(int(key) for batch in names["loader"] for key in batch["id"]) == list(range(100))
