"""The template of a pipeline of one's own: a copy of it works, and what its comments warn of is noticed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from minato_gpu import DataLoader
from minato_gpu.lab.cli import main
from tests.support.pages import ROOT

Copy = Callable[[str, str], None]


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copy]:
    """Copies the template to mine.py of the current folder, with one text replaced."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    template = (ROOT / "pipelines" / "template.py").read_text(encoding="utf-8")

    def write(old: str, new: str) -> None:
        assert old in template
        Path("mine.py").write_text(template.replace(old, new), encoding="utf-8")
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("lane", ["cpu", "device"])
def test_a_copy_delivers_pictures(copy: Copy, lane: Any) -> None:
    copy("SIZE = 224", "SIZE = 32")
    mine: Any = importlib.import_module("mine")
    mine.example_data("photographs")
    loader = DataLoader(
        mine.dataset("photographs"),
        batch_size=8,
        pipeline=mine.pipeline(),
        num_workers=1,
        lanes=(lane,),
        multiprocessing_context="forkserver",
    )
    (batch,) = loader
    assert batch["image"].shape == (8, 3, 32, 32) and batch["number"].tolist() == list(range(8))
    assert batch["image"].max() - batch["image"].min() > 3


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("SIZE = 224", "SIZE = 100", "every stage is within its tolerance"),
        (", antialias=False", "", "deviates by more than its tolerance"),
        ("int(rng.random() < 0.5)", "bool(rng.random() < 0.5)", "Expected int32"),
        (
            'writes={"encoded": Field(np.uint8, (None,))}',
            "writes={}",
            'read: writes={"encoded": Field(np.uint8, (None,))},',
        ),
    ],
)
def test_check_says_so(copy: Copy, old: str, new: str, said: str) -> None:
    copy(old, new)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["check", "mine.py"])
    assert said in result.output
    assert (result.exit_code == 0) == ("every" in said)
