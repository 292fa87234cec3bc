"""What tests of the cache on disk share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minato_gpu.sources.disk.tier import DiskTier
from tests.sources.disk.content import BUDGET


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A directory that a tier is to make."""
    return tmp_path / "cache"


@pytest.fixture
def tier(path: Path) -> Iterator[DiskTier]:
    """A new tier."""
    made = DiskTier(path, BUDGET)
    yield made
    made.close()
