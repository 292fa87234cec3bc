"""The harness itself: leaks are found, skipped GPU tests and warnings fail, programs end, and which cases run."""

from __future__ import annotations

import os
import threading
from itertools import combinations, product
from multiprocessing import get_context
from multiprocessing.context import ForkContext, ForkServerContext
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
from tests.support.leaks import assert_no_leaks, leaks, take_snapshot
from tests.support.programs import Program
from tests.support.selection import chosen


@pytest.mark.parametrize("context", [get_context("fork"), get_context("forkserver")], ids=["fork", "forkserver"])
def test_a_process_is_found_and_forgotten_once_it_ends(context: ForkContext | ForkServerContext) -> None:
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


@pytest.mark.parametrize("at_once", [False, True])
def test_a_program_ends_as_one_of_the_shell_does(at_once: bool) -> None:
    program = Program("json.tool", "--compact", at_once=at_once)
    assert program.communicate('{"a": 1}') == ('{"a":1}\n', "")
    assert program.returncode == 0
    refused = Program("json.tool", at_once=at_once)
    _, errors = refused.communicate("not JSON")
    assert refused.returncode == 1 and "Expecting value" in errors


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


def test_order_and_kind_of_worker_meet_each_other_and_every_number_of_workers() -> None:
    kept = _chosen(_modes(1, 2, 3))
    assert len(kept) == 6
    for number in (1, 2, 3):
        modes = [case["mode"] for case in kept if case["workers"] == number]
        assert {mode.lateness > 0 for mode in modes} == {mode.processes for mode in modes} == {True, False}
    modes = [case["mode"] for case in kept]
    assert len({(mode.lateness > 0, mode.processes) for mode in modes}) == 4
    assert {mode.lateness for mode in modes} == {0, 1, 8}, "how late batches may be occurs, but not in every pair"


def test_pytorchs_own_loader_is_left_out() -> None:
    assert all(case["mode"] is not PYTORCH for case in _chosen(_modes(2, modes=EVERY)))
    classes = [torch.utils.data.DataLoader, minato_gpu.DataLoader]
    assert _chosen([_Case({"loader_class": each}) for each in classes]) == [{"loader_class": minato_gpu.DataLoader}]


def test_what_is_listed_together_stays_together_unless_it_is_asked_for_apart() -> None:
    full = [dict(zip("abc", values, strict=True)) for values in product("xy", "xy", "xy")]
    assert len(_chosen([_Case(case, together="a, b, c") for case in full])) == 8
    assert len(_chosen([_Case(case, ("each_pair",), "a, b, c") for case in full])) == 4
    assert len(_chosen([_Case(case, ("each_value",), "a, b, c") for case in full])) == 2


def test_of_drawn_orders_two_are_enough_and_the_worst_ones_occur_with_all_else() -> None:
    cases = [{"order": order, "lanes": lanes} for lanes, order in product("abc", ["lazy", *range(6)])]
    kept = _chosen([_Case(case) for case in cases])
    for orders, number in (({"lazy"}, 3), (set(range(6)), 3)):
        some = [case for case in kept if case["order"] in orders]
        assert {case["lanes"] for case in some} == set("abc") and len(some) == number
    assert {case["order"] for case in kept} == {"lazy", 0, 1}


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
