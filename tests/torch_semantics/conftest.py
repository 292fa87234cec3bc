"""Every test of this suite leaves nothing behind."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_leaks(no_leaks: None) -> None:
    """Applies the leak check."""


@pytest.fixture(params=[0, 2], ids=["main", "workers"])
def num_workers(request: pytest.FixtureRequest) -> int:
    """Without workers and with two."""
    return int(request.param)
