"""Every contract test leaves no process, thread or shared memory behind."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _no_leaks(no_leaks: None) -> None:
    """Applies the leak check."""


class _WaitedFor(ThreadPoolExecutor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        submitted = super().submit(fn, *args, **kwargs)
        wait([submitted])
        return submitted


@pytest.fixture
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers wait while a copy is written to disk, so that hits do not depend on how fast the disk is."""
    monkeypatch.setattr("minato_gpu.sources.disk_pool.ThreadPoolExecutor", _WaitedFor)
