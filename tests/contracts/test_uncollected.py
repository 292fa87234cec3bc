"""A program that ignores SIGCHLD: no exit code is known to it, and its loader works as in any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import programs

SAMPLES = 64
WHOLE = str(sum(range(SAMPLES)))
DIED = "exited unexpectedly with an exit code that is not known, as something else has collected the process"


def _says(folder: Path, killed: int, on_worker_death: str) -> list[str]:
    for key in range(SAMPLES):
        (folder / str(key)).write_bytes(bytes([key]))
    return programs.run("tests.contracts.uncollected", str(folder), str(killed), on_worker_death).splitlines()


@pytest.mark.parametrize("on_worker_death", ["raise", "replace"])
def test_an_epoch_ends_well(tmp_path: Path, on_worker_death: str) -> None:
    assert _says(tmp_path, -1, on_worker_death) == [WHOLE]


def test_a_worker_that_is_killed_is_an_error(tmp_path: Path) -> None:
    [said] = _says(tmp_path, 11, "raise")
    assert said.startswith("WorkerDied DataLoader worker (pid(s) ") and DIED in said


def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    told, said = _says(tmp_path, 11, "replace")
    assert DIED in told and told.endswith("It is being replaced.")
    assert said == WHOLE
