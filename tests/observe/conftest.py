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
    times = {"p50": 0.25, "p95": 0.5, "p99": 0.75}
    return {
        "samples_expected": 1000,
        "samples_delivered": samples,
        "samples_failed": 0,
        "samples_skipped": 0,
        "samples_padded": 0,
        "samples_repeated": 0,
        "workers": {"died": 0, "hung": 0, "replaced": 0},
        "batches_delivered": samples // 10,
        "elapsed_s": elapsed,
        "first_batch_s": None,
        "lanes": {"cpu": lane(samples)},
        "wait_s": {**times, "total": 0.0},
        "stalls": {},
        "lateness": {"p50": 0.0, "p95": 0.0, "p99": 0.0, "max": 0.0},
        "bytes_in_flight": 12_000,
        "bytes_in_flight_peak": 34_000_000,
        "failures": [],
        **more,
    }


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


def state(at_s: float, epoch: int = 0, name: str = "Photographs-1", **told: Any) -> LoaderState:
    """An answer, of a loader whose epoch began at 0 seconds."""
    return LoaderState(name, epoch, at_s, stats(**{"elapsed": at_s, **told}))


class Speaker:
    """A loader that says what it is told to."""

    kind = "Photographs"

    def __init__(self, told: LoaderSnapshot | None = None) -> None:
        self.says = told

    def snapshot(self) -> LoaderSnapshot | None:
        """See Teller."""
        return self.says
