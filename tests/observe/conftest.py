"""A folder for sockets that only the test uses."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from minato_gpu.observe import listening, shared_service
from tests.support.waiting import wait_until


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that the user's processes share, where this process listens for the test's loaders alone: others may
    be alive, in a traceback, say. Its thread ends with them."""
    own = shared_service.SharedService(listening.Listener)
    monkeypatch.setattr(listening, "_listening", own)
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    before = _watching()
    yield folder
    gc.collect()
    assert wait_until(lambda: _watching() <= before)
    shared_service._services.remove(own)


def _watching() -> set[int]:
    return {thread.ident or 0 for thread in threading.enumerate() if thread.name == "minato-watch"}
