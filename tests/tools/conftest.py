"""What tests of several tools share: Accelerate, whose state is put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """The package."""
    found = pytest.importorskip("accelerate")
    yield found
    found.state.AcceleratorState._reset_state(True)
    found.state.GradientState._reset_state()
