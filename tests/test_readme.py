"""The examples of the README run as they stand there."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from minato_gpu import DataLoader
from minato_gpu.cli import main
from pipelines import image_classification

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def recordings(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The third example as the module that it says it is."""
    (here / "recordings.py").write_text(EXAMPLES[2])
    monkeypatch.syspath_prepend(here)
    yield importlib.import_module("recordings")
    del sys.modules["recordings"]


def test_there_are_four_examples() -> None:
    """The last one is for ``tests/tools/test_accelerate.py``."""
    assert len(EXAMPLES) == 4


def test_a_plain_data_set_changes_the_import_only() -> None:
    seen: list[Any] = []
    names: dict[str, Any] = {"dataset": [np.full(3, number) for number in range(100)], "seen": seen}
    exec(EXAMPLES[0].replace("    ...", "    seen.append(batch)"), names)
    assert sorted(row[0].item() for batch in seen for row in batch) == list(range(100))


def test_photographs_go_through_the_example_pipeline(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image_classification.example_data(here / "photographs")
    names: dict[str, Any] = {}
    exec(EXAMPLES[1], names)
    assert names["images"].shape[1:] == (3, 224, 224)
    assert len(names["images"]) == len(names["labels"])
    assert "cpu" in capsys.readouterr().out


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_pipeline_of_ones_own(here: Path, recordings: Any, start: str) -> None:
    (here / "recordings").mkdir()
    recordings.example_data("recordings")
    signals = [np.load(here / "recordings" / f"{number}.npy") for number in range(8)]
    asked = re.search(r"`(DataLoader\(.*pipeline=pipeline\(\).*)\)` then", README.read_text(encoding="utf-8"))
    assert asked is not None
    names = {"DataLoader": DataLoader, **vars(recordings)}
    (batch,) = eval(f"{asked[1]}, lanes=('cpu', 'device'), multiprocessing_context={start!r})", names)
    assert batch["signal"].shape == (8, 16_000) and batch["number"].tolist() == list(range(8))
    for signal, part in zip(signals, batch["signal"].numpy(), strict=True):
        gains = [
            part / signal[at : at + 16_000] for at in range(len(signal) - 16_000 + 1) if _matches(signal, part, at)
        ]
        assert len(gains) == 1 and 0.5 <= gains[0][0] <= 2 and np.allclose(gains[0], gains[0][0])


def _matches(signal: Any, part: Any, at: int) -> bool:
    """Whether the part may have been cut out here: the first values are in the same proportion."""
    return bool(np.allclose(part[:3] * signal[at], signal[at : at + 3] * part[0], rtol=1e-4))


@pytest.mark.parametrize("own", [False, True])
def test_both_implementations_of_it_mean_the_same(here: Path, recordings: Any, own: bool) -> None:
    data = []
    if own:
        (here / "mine").mkdir()
        recordings.example_data("mine")
        data = ["--data", "mine"]
    result = CliRunner().invoke(main, ["check", "recordings", *data])
    assert result.exit_code == 0, result.output
    assert "every stage is within its tolerance" in result.output
