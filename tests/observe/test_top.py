"""``minato-gpu top``: what it says of jobs, in 80 columns, and how it ends."""

from __future__ import annotations

import os
import pty
import signal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console, Group

from minato_gpu.lab import top
from minato_gpu.lab.cli import main
from minato_gpu.lab.top import JobState
from tests.observe.conftest import lane, state, training
from tests.support.programs import Program


def _top(*arguments: str, code: int = 0) -> Any:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(main, ["top", *arguments])
    assert result.exit_code == code, result.output
    return result


def test_one_job_is_found_and_of_several_one_is_named(runtime: Path) -> None:
    with training(runtime, 2) as (first, second):
        listed = _top(code=1).output
        assert "there are 2 jobs: " in listed and all(str(one.pid) in listed.split() for one in (first, second))
        first.kill()
        first.wait()
        said = _top("--interval", "0.1").output
    assert f"process {second.pid}: " in said and "range-1  epoch" in said and "of 64" in said
    assert max(map(len, said.splitlines())) <= 80


def test_no_job(runtime: Path) -> None:
    assert "no process of yours has a loader with workers at work" in _top(code=1).output
    assert (
        f"process {os.getpid()} has no loader with workers at work, or has ended"
        in _top(str(os.getpid()), code=1).output
    )
    (runtime / "minato-gpu").rmdir()
    (runtime / "minato-gpu").symlink_to(runtime)
    assert "no process can be asked" in _top(code=1).output


@pytest.mark.parametrize("wrong", [["none"], ["0"], ["1", "--interval", "0"]])
def test_wrong_arguments(wrong: list[str]) -> None:
    assert "Invalid value" in _top(*wrong, code=2).output


def _live(pid: int) -> tuple[Program, int]:
    """The command in a terminal of 80 columns, and the terminal's other end."""
    end, terminal = pty.openpty()
    arguments = ("top", str(pid), "--interval", "0.1")
    return Program("minato_gpu", *arguments, environment={"COLUMNS": "80"}, terminal=terminal), end


def _until(end: int, word: str, said: str = "") -> str:
    """What the terminal shows, up to that word or the end."""
    while word not in said:
        try:
            said += os.read(end, 1 << 16).decode(errors="replace")
        except OSError:  # nobody has the other end any more
            break
    return said


@pytest.mark.parametrize("how", ["the job ends", "Ctrl-C"])
def test_a_live_view_until_it_ends(runtime: Path, how: str) -> None:
    with training(runtime) as (job,):
        viewer, end = _live(job.pid)
        try:
            said = _until(end, "samples/s")
            assert f"process {job.pid}: " in said
            if how == "Ctrl-C":
                os.kill(viewer.pid, signal.SIGINT)
            else:
                job.kill()
            said = _until(end, "no such word", said)
            code = viewer.wait()
        finally:
            os.close(end)
        assert how != "Ctrl-C" or job.poll() is None
    assert code == (0 if how == "Ctrl-C" else 1), said
    assert ("or has ended" in said) == (how != "Ctrl-C"), said
    assert "Traceback" not in said


# --- figures of two answers, and what is shown of them --------------------------------------------------------------

STALLS = {cause: {"count": 9, "seconds": 3.3} for cause in ("preparation", "fetch", "device", "budget", "lateness")}


def test_rates_are_of_the_time_between_two_answers() -> None:
    one = state(10.0, samples=1000, lanes={"cpu": lane(1000, 0.9, 2)})
    found = top.rates_of(one, state(12.0, samples=1100, lanes={"cpu": lane(1100, 10.0 / 12.0, 2)}))
    assert found["samples", ""] == found["lane_samples", "cpu"] == 50.0
    assert found["lane_busy_seconds", "cpu"] == pytest.approx(1.0)
    for before in (None, state(9.0, epoch=3, samples=900)):  # of the epoch, where no earlier answer is of it
        assert top.rates_of(before, state(10.0, epoch=4, samples=100, elapsed=4.0))["samples", ""] == 25.0


def _shown(*loaders: Any, rank: str | None = None) -> str:
    out = StringIO()
    job = JobState(4711, "train.py", rank, list(loaders))
    Console(file=out, width=80).print(Group(*top.shown(None, job, 80)))
    return out.getvalue()


def test_what_it_says() -> None:
    share = {"granted": 20, "copied": 75, "again": 5}
    said = _shown(state(10.0, epoch=2, samples=500, stalls=STALLS, wait_s={"total": 5.0}, share=share), rank="3")
    assert "75% of the samples copied from other loaders" in said
    assert "process 4711, rank 3: train.py" in said
    assert "Photographs-1  epoch 2  [##########..........] 50%  500 of 1,000" in said
    assert "50.0 samples/s; the training loop waited 100%: preparation 33%, fetch 33%" in said
    assert "0 samples failed; 12.0 kB in flight, 34.0 MB at most" in said
    assert "no loader has begun an epoch" in _shown()
    assert "500 samples" in _shown(state(1.0, samples=500, samples_expected=None))
