"""Every contract test leaves no process, thread or shared memory behind."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_leaks(no_leaks: None) -> None:
    """Applies the leak check."""
