"""A folder for sockets that only the test uses."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from tests.waiting import wait_until


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the user's processes share, while nobody of this process listens elsewhere."""
    gc.collect()
    assert wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("minato-watch")])
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder
