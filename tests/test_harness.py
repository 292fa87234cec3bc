"""The harness itself: leaks are found, and skipped GPU tests and warnings fail."""

from __future__ import annotations

import os
import threading
from itertools import combinations, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import covering
from tests.support.covering import pairwise
from tests.support.leaks import assert_no_leaks, leaks, take_snapshot
from tests.support.programs import Program


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
