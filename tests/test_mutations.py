"""The list of faults stays true as code moves: each is about code that is there, once, and still is code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations.catalogue import ALL
from tests.mutations.fault import Fault
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
