"""The harness itself: leaks are found, skipped GPU tests and warnings fail, and a rehearsal without PyTorch stops."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from itertools import combinations, product
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

import minato_gpu
from tests.contracts.modes import EVERY, MINATO, PYTORCH
from tests.support import covering
from tests.support.covering import pairwise
from tests.support.fake_device import FakeDevice
from tests.support.leaks import assert_no_leaks, leaks, take_snapshot
from tests.support.programs import Program
from tests.support.selection import chosen


def test_a_process_is_found_and_forgotten_once_it_ends() -> None:
    context = get_context("fork")
    waits, says = context.Pipe()
    before = take_snapshot()
    process = context.Process(target=waits.recv)
    process.start()
    found = [leak for leak in leaks(before, descriptors=False) if leak.startswith("process")]
    says.send("end")
    process.join()
    process.close()
    assert len(found) == 1
    assert_no_leaks(before, descriptors=False)


@pytest.mark.parametrize("name", ["minato_harness_{pid}", "torch_{pid}_1_0"])
def test_shared_memory_threads_and_descriptors_are_found(name: str) -> None:
    before = take_snapshot()
    path = Path("/dev/shm") / name.format(pid=os.getpid())
    path.write_bytes(b"x")
    gate, opened = threading.Event(), [os.memfd_create("minato_harness"), *os.pipe()]
    thread = threading.Thread(target=gate.wait, name="forgotten")
    thread.start()
    found = leaks(before)
    gate.set()
    thread.join()
    path.unlink()
    for number in opened:
        os.close(number)
    kinds = [f"{count} more descriptors of kind {kind}" for count, kind in ((1, "memfd"), (2, "pipe"))]
    assert found == ["thread forgotten", f"shared memory {path.name}", *kinds]


_INNER = """
import warnings
import pytest

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_runs(device):
    if device == "cuda":
        pytest.skip("as if there were no GPU")

def test_warns():
    warnings.warn("said")
"""


@pytest.mark.parametrize("required", [False, True])
def test_gpu_option_and_warnings(tmp_path: Path, required: bool) -> None:
    inner = tmp_path / "test_inner.py"
    inner.write_text(_INNER)
    command = ["-q", "-p", "tests.conftest", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(inner)]
    said, _ = Program("pytest", *command, *(["--require-gpu"] if required else [])).communicate()
    outcome = said.strip().splitlines()[-1]
    assert "UserWarning: said" in said
    assert ("1 failed, 1 passed, 1 error" in outcome) if required else ("1 failed, 1 passed, 1 skipped" in outcome), (
        said
    )


# --- which cases the gate runs ----------------------------------------------------------------------------------------


class _Case:
    """One case of a test, as much of it as is looked at."""

    parent = SimpleNamespace(nodeid="tests/test_it.py")
    originalname = "test_it"

    def __init__(self, params: dict[str, Any], marks: tuple[str, ...] = (), together: str = "") -> None:
        self.callspec = SimpleNamespace(params=params)
        self.name = "test_it"
        self.marks = marks
        self.together = together

    def get_closest_marker(self, name: str) -> Any:
        """The mark, if it has it."""
        return name if name in self.marks else None

    def iter_markers(self, name: str) -> Any:
        """Its parameters' mark."""
        return [SimpleNamespace(args=(self.together, []))] if self.together else []


def _chosen(cases: list[_Case]) -> list[dict[str, Any]]:
    kept = chosen(cast(list[pytest.Item], cases))
    return [case.callspec.params for case in cases if cast(pytest.Item, case) in kept]


def _modes(*workers: int, modes: Any = MINATO, **more: Any) -> list[_Case]:
    return [_Case({"mode": mode, "workers": count}, **more) for mode, count in product(modes, workers)]


def test_pytorchs_own_loader_is_left_out() -> None:
    assert all(case["mode"] is not PYTORCH for case in _chosen(_modes(2, modes=EVERY)))
    classes = [torch.utils.data.DataLoader, minato_gpu.DataLoader]
    assert _chosen([_Case({"loader_class": each}) for each in classes]) == [{"loader_class": minato_gpu.DataLoader}]


# --- a few cases in which all pairs of values occur -------------------------------------------------------------------


def _full(*sizes: int) -> list[covering.Case]:
    names = [f"factor {number}" for number in range(len(sizes))]
    return [dict(zip(names, values, strict=True)) for values in product(*map(range, sizes))]


def _covered(cases: list[covering.Case]) -> set[Any]:
    return {pair for case in cases for strength in (1, 2) for pair in combinations(sorted(case.items()), strength)}


@given(st.lists(st.integers(1, 4), min_size=0, max_size=4), st.data())
def test_all_pairs_that_occur_are_kept(sizes: list[int], data: st.DataObject) -> None:
    """Of any set of cases: a test may leave out combinations that mean nothing."""
    full = _full(*sizes)
    cases = data.draw(st.lists(st.sampled_from(full), unique_by=str)) if full else []
    few = pairwise(cases)
    assert few == sorted(set(few)) == pairwise(cases)
    assert _covered([cases[at] for at in few]) == _covered(cases)
    assert bool(few) == bool(cases)


ROOT = Path(__file__).parents[1]


def on(device: FakeDevice) -> Any:
    """A stream of its own, on which the test issues."""
    return device.running(device.stream())


# --- the stand-in for CUDA, as far as it needs no build of PyTorch for CUDA; make rehearse tests the rest -------------


def test_a_rehearsal_without_pytorch_for_cuda_says_so_and_stops(tmp_path: Path) -> None:
    python = tmp_path / "bin/python"  # of the environment; its pip finds nothing
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'ERROR: first' >&2; echo 'ERROR: no network' >&2; exit 1\n", encoding="ascii")
    python.chmod(0o755)
    given = ["make", "rehearse", f"REHEARSAL={tmp_path}", f"PYTHON_REHEARSAL={sys.executable}"]
    done = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode and len(said) == 1 and said[0].startswith("no rehearsal: "), done.stderr
    if (sys.platform, sys.version_info[:2]) == ("linux", (3, 11)) and shutil.which("g++"):  # else it says so
        assert "torch==2.11.0 for CUDA" in said[0] and said[0].endswith(": ERROR: no network")
    assert not (tmp_path / ".installed").exists()
