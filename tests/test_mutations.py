"""The list of faults stays true as code moves: each is about code that is there, once, and still is code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations.catalogue import ALL
from tests.mutations.fault import Fault
from tests.mutations.trying import ROOT


def fits(fault: Fault) -> bool:
    """Whether its text is in the code once, and what comes in its place is code."""
    text = fault.path(ROOT).read_text()
    try:
        ast.parse(text.replace(fault.before, fault.after))
    except SyntaxError:
        return False
    return text.count(fault.before) == 1 and fault.before != fault.after


def test_faults_can_be_put_into_the_code() -> None:
    others = [fault.name for fault in ALL if not fits(fault)]
    assert not others, "\n".join(others)


def test_faults_name_tests_that_are_there() -> None:
    for fault in ALL:
        assert fault.likely and all((ROOT / "tests" / file).is_file() for file in fault.likely), fault.name


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in ALL}) == len(ALL) >= 40
    assert 2 * sum(bool(fault.reverts) for fault in ALL) >= 40


def test_a_fault_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "minato_gpu").mkdir()
    (tmp_path / "minato_gpu" / "a.py").write_text("x = 1\nx = 1\n")
    fault = Fault("twice", "a.py", "x = 1", "x = 2", ("test_mutations.py",))
    with pytest.raises(ValueError, match="2 places"):
        fault.apply(tmp_path)
