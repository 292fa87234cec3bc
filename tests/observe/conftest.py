"""A folder for sockets that only the test uses, and counters of loaders made by hand."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from minato_gpu.lab.top import LoaderState
from minato_gpu.observe import shared_service, stats_socket
from minato_gpu.observe.shared_service import LoaderSnapshot
from minato_gpu.observe.telemetry import Telemetry
from tests.support.programs import Program
from tests.support.waiting import wait_until


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that the user's processes share, where this process listens for the test's loaders alone: others may
    be alive, in a traceback, say. Its thread ends with them."""
    own = shared_service.SharedService(stats_socket.Listener)
    monkeypatch.setattr(stats_socket, "_listening", own)
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


@contextmanager
def training(runtime: Path, count: int = 1) -> Iterator[list[Program]]:
    """Jobs that train."""
    with ExitStack() as undo:
        started = []
        for _ in range(count):
            program = Program("tests.observe.watched_program", environment={"XDG_RUNTIME_DIR": str(runtime)})
            undo.callback(program.close)
            undo.callback(program.kill)
            started.append(program)
        assert [program.stdout.readline() for program in started] == ["trains\n"] * count
        yield started


def stats(samples: int = 0, elapsed: float = 10.0, **more: Any) -> dict[str, Any]:
    """``stats()`` of a loader with one lane, which has delivered so many samples in so many seconds."""
    log = Telemetry(0.0)
    log.expected, log.samples = 1000, samples
    held = {"bytes_in_flight": 12_000, "bytes_in_flight_peak": 34_000_000}
    return {**log.stats(elapsed), "lanes": {"cpu": lane(samples)}, **held, **more}


def lane(samples: int, busy_share: float = 0.5, slots: int = 2) -> dict[str, Any]:
    """What is said of a lane."""
    times = {"p50": 0.25, "p95": 0.5, "p99": 0.75}
    return {
        "samples": samples,
        "handed_over": 0,
        "slots": slots,
        "busy_share": busy_share,
        "queue_s": times,
        "service_s": times,
    }


def state(at_s: float, epoch: int = 0, **told: Any) -> LoaderState:
    """An answer, of a loader whose epoch began at 0 seconds."""
    return LoaderState("Photographs-1", epoch, at_s, stats(**{"elapsed": at_s, **told}))


class Speaker:
    """A loader that says what it is told to."""

    kind = "Photographs"

    def __init__(self, told: LoaderSnapshot | None = None) -> None:
        self.says = told

    def snapshot(self) -> LoaderSnapshot | None:
        return self.says
