"""The list of faults stays true as code moves: each is about code that is there, once, and still is code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations.catalogue import ALL
from tests.mutations.fault import Fault
from tests.mutations.reach import line_of, reached
from tests.mutations.trying import ROOT


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_a_fault_can_be_put_into_the_code(fault: Fault) -> None:
    text = fault.path(ROOT).read_text()
    assert text.count(fault.before) == 1
    assert fault.before != fault.after
    ast.parse(text.replace(fault.before, fault.after))
    assert fault.likely and all((ROOT / "tests" / file).is_file() for file in fault.likely)


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in ALL}) == len(ALL) >= 40
    assert 2 * sum(bool(fault.reverts) for fault in ALL) >= 40


def test_a_fault_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "minato_gpu").mkdir()
    (tmp_path / "minato_gpu" / "a.py").write_text("x = 1\nx = 1\n")
    fault = Fault("twice", "a.py", "x = 1", "x = 2", ("test_mutations.py",))
    with pytest.raises(ValueError, match="2 places"):
        fault.apply(tmp_path)


def test_which_tests_reach_a_fault(tmp_path: Path) -> None:
    (tmp_path / "minato_gpu").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "mutations").symlink_to(ROOT / "tests" / "mutations")
    code = "def f(x):\n    if x:\n        return 1\n    elif x is None:\n        return 2\n    return 3\n"
    (tmp_path / "minato_gpu" / "a.py").write_text(code)
    tests = [f"def test_{name}():\n    assert f({x})\n" for name, x in (("one", 1), ("none", None))]
    (tmp_path / "tests" / "test_a.py").write_text("from minato_gpu.a import f\n\n" + "".join(tests))
    faults = [Fault(before, "a.py", before, "pass", ()) for before in ("return 1", "return 2", "return 3", "if x:")]
    assert [line_of(code, fault) for fault in faults] == [3, 5, 6, 2]
    one, none = "test_a.py::test_one", "test_a.py::test_none"
    found = reached(tmp_path, faults, ["test_a.py"], processes=0)
    assert found == {"return 1": [one], "return 2": [none], "return 3": [], "if x:": [none, one]}
    assert (tmp_path / "minato_gpu" / "a.py").read_text() == code
