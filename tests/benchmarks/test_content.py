"""The check of what was delivered must be able to fail: a loader that drops, repeats or changes a sample is caught."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import work as work_module
from benchmarks.isolate import MeasurementError, at_end, isolated
from benchmarks.paired import run
from benchmarks.peers import Job
from benchmarks.peers.pytorch import PyTorch
from benchmarks.work import Consumer, ContentError, Costly, Trivial, WorkLog, reference
from tests.support.leaks import gone
from tests.support.waiting import wait_until

_DATASET = Trivial(96, words=16)
_JOB = Job(_DATASET, batch_size=32, workers=1, sample_bytes=128)


def _batches() -> list[Any]:
    return [np.stack([_DATASET[index] for index in batch]) for batch in _JOB.batches]


def _read(batches: Iterable[Any]) -> Consumer:
    consumer = Consumer()
    for batch in batches:
        consumer.read(batch)
    return consumer


def _dropped(batches: list[Any]) -> list[Any]:
    return [batches[0], batches[1][1:], batches[2]]


def _twice(batches: list[Any]) -> list[Any]:
    batches[2][5] = batches[0][5]
    return [*batches, _DATASET[69][None]]


def _changed(batches: list[Any]) -> list[Any]:
    batches[1][3, 15] += 1
    return batches


def _foreign(batches: list[Any]) -> list[Any]:
    batches[1][3] += 1000
    return batches


def test_what_is_delivered_whole_passes_in_any_order() -> None:
    batches = [torch.from_numpy(batch) for batch in reversed(_batches())]
    _read(batches).check(reference(_DATASET))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_dropped, "missing samples: 32"),
        (_twice, "repeated samples: 5"),
        (_changed, "changed samples: 35"),
        (_foreign, "outside the data set"),
    ],
)
def test_damage_is_named(damage: Callable[[list[Any]], list[Any]], problem: str) -> None:
    with pytest.raises(ContentError, match=problem):
        _read(damage(_batches())).check(reference(_DATASET))


def test_nothing_delivered_is_everything_missing() -> None:
    with pytest.raises(ContentError, match="missing samples: 0, 1, 2, 3, 4 and 91 more"):
        Consumer().check(reference(_DATASET))


class _Dropping(PyTorch):
    """PyTorch's loader, but the last sample of the second batch never arrives."""

    def make(self, job: Job) -> Iterable[Any]:
        return _WithoutOne(super().make(job))


class _WithoutOne:
    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._batches):
            yield batch[:-1] if number == 1 else batch


@pytest.mark.usefixtures("no_leaks")
def test_a_loader_that_drops_a_sample_fails_its_measurement() -> None:
    isolated(run, _JOB, PyTorch("whole"), 0.01, 0.0)
    with pytest.raises(MeasurementError, match="samples that did not come once in an epoch"):
        isolated(run, _JOB, _Dropping("dropping"), 0.01, 0.0)


def test_the_work_enters_the_sample() -> None:
    """A loader that skipped the work could not produce the digest."""
    some, more = (Costly(np.full(4, operations), words=8) for operations in (3, 4))
    assert reference(some).tolist() == reference(some).tolist()
    assert not np.any(reference(some) == reference(more))


# --- fixed work, the log of who did it when, and isolation ------------------------------------------------------------


def test_work_done_before_the_clock_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    monkeypatch.setattr(work_module, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    log = WorkLog(samples=2, epochs=2)
    for index in (0, 1):
        log.end(index, log.begin(index))
    assert log.done_before(10.0, first_epoch=1) == 0.0
    epoch = log.begin(0)
    assert log.done_before(20.0, first_epoch=1) == 4.0  # not ended yet
    log.end(0, epoch)
    assert [log.done_before(moment, first_epoch=1) for moment in (10.0, 20.0, 40.0)] == [0.0, 4.0, 16.0]
    assert log.done_before(10.0, first_epoch=0) == 5.0


def _exit() -> None:
    os._exit(3)


def _crash() -> None:
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_measurement_that_fails_says_why() -> None:
    with pytest.raises(MeasurementError, match="ZeroDivisionError"):
        isolated(divmod, 1, 0)
    with pytest.raises(MeasurementError, match="ended with status 3 without a result"):
        isolated(_exit)
    with pytest.raises(MeasurementError, match="was ended by SIGSEGV without a result"):
        isolated(_crash)


def _leave(path: Path, times: int) -> int:
    """As a loader leaves shared memory that outlives its process; fails for none."""
    path.touch()
    at_end.append(path.unlink)
    return 1 // times


def test_a_measurement_undoes_what_would_outlive_it(tmp_path: Path) -> None:
    assert isolated(_leave, tmp_path / "left", 1) == 1
    with pytest.raises(MeasurementError, match="ZeroDivisionError"):
        isolated(_leave, tmp_path / "left", 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_leaks")
def test_a_measurement_that_hangs_is_ended() -> None:
    with pytest.raises(MeasurementError, match=r"no result after 0\.2 s"):
        isolated(time.sleep, 60.0, timeout_s=0.2)


@pytest.mark.usefixtures("no_leaks")
def test_an_interrupted_benchmark_takes_its_measurement_with_it() -> None:
    """SIGTERM to the benchmark: the fresh process and its group are gone when it has ended."""
    code = (
        "import subprocess\n"
        "from benchmarks import report\n"
        "from benchmarks.isolate import isolated\n"
        "def forever():\n"
        "    print(subprocess.Popen(['sleep', '60']).pid, flush=True)\n"
        "    subprocess.Popen(['sleep', '60']).wait()\n"
        "@report.benchmark('storage', 1)\n"
        "def main(**options): yield isolated(forever)\n"
        "main()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        sleeper = int(benchmark.stdout.readline())
        benchmark.terminate()
        assert benchmark.wait(30) == 128 + signal.SIGTERM
    assert wait_until(lambda: gone(sleeper))
