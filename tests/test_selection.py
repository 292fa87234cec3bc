"""What the gate runs of a test's cases."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.utils.data

import minato_gpu
from tests.conftest import LEFT_OUT, pytest_testnodedown
from tests.contracts.modes import EVERY, MINATO, PYTORCH
from tests.support.programs import Program
from tests.support.selection import chosen


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


def test_without_workers_the_mode_makes_no_difference() -> None:
    kept = _chosen(_modes(0, 2))
    assert [case["workers"] for case in kept].count(0) == 1 and len(kept) == 1 + 4


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


def test_a_test_on_request_is_left_out() -> None:
    assert _chosen([_Case({}, ("on_request",)), _Case({})]) == [{}]


def test_what_is_left_out_is_counted(pytestconfig: pytest.Config) -> None:
    """Also by the processes of xdist, which tell it at their end."""
    config = SimpleNamespace(stash=pytest.Stash())
    pytest_testnodedown(SimpleNamespace(config=config, workeroutput={"deselected": 7}))
    assert config.stash[LEFT_OUT] == 7
    file, named = "tests/torch_semantics/test_object.py", "test_every_argument_is_a_plain_attribute"
    for arguments, left_out in (((file, "--all"), False), ((file,), True), ((f"{file}::{named}",), False)):
        program = Program("pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *arguments, at_once=True)
        said, _ = program.communicate()
        assert ("deselected" in said) == left_out and ("--all runs" in said) == left_out, said
