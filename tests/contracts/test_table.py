"""Every case of the table: what comes is what the oracle says, on this loader and, where it promises the same, on
PyTorch's."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

from tests.contracts.cases import Case, table
from tests.contracts.material import written
from tests.contracts.oracle import Drawn, differences, draws, plainest
from tests.contracts.run import run


@functools.cache
def _drawn(plain: Case) -> Drawn:
    """What samples draw in the plainest run."""
    with tempfile.TemporaryDirectory() as folder:
        return draws(plain, run(plain, _filled(Path(folder))))


def _filled(folder: Path) -> Path:
    (folder / "files").mkdir()
    written(folder / "files")
    return folder


@pytest.mark.parametrize("case", table(), ids=str)
def test_this_loader(case: Case, tmp_path: Path) -> None:
    plain = plainest(case)
    found = differences(case, run(case, _filled(tmp_path)), None if plain is None else _drawn(plain))
    assert not found, f"{case}\n" + "\n".join(found)
