"""Names for sockets that only the test uses."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from uuid import uuid4

import pytest

from minato_gpu.observe import listening, shared_service, sockets
from tests.waiting import wait_until


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How the names of sockets begin, under which this process listens for the test's loaders alone: others may be
    alive, in a traceback, say. Its thread ends with them."""
    own = shared_service.SharedService(listening.listen)
    monkeypatch.setattr(listening, "_listening", own)
    name = f"minato-gpu-test-{uuid4().hex}"
    monkeypatch.setattr(sockets, "_NAME", name)
    before = _watching()
    yield name
    gc.collect()
    assert wait_until(lambda: _watching() <= before)
    shared_service._services.remove(own)


def _watching() -> set[int]:
    return {thread.ident or 0 for thread in threading.enumerate() if thread.name == "minato-watch"}
