"""The examples of the README run as they stand there."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minato_gpu import DataLoader, parity
from pipelines import image_classification

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own_stage(here: Path) -> Iterator[Any]:
    """The third example as a module, because workers and ``check`` want module-level functions."""
    (here / "own_stage.py").write_text(EXAMPLES[2])
    spec = importlib.util.spec_from_file_location("own_stage", here / "own_stage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_stage"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["own_stage"]


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


def test_a_stage_of_ones_own_means_the_same_on_both_lanes(own_stage: Any) -> None:
    samples: Any = [{"signal": np.random.default_rng(n).normal(size=16_000).astype(np.float32)} for n in range(5)]
    assert all(row.passed for row in parity.check(own_stage.augment, samples))
    (batch,) = DataLoader(samples, batch_size=5, pipeline=own_stage.augment)
    gains = batch["signal"].numpy()[:, 0] / [sample["signal"][0] for sample in samples]
    assert ((gains >= 0.5) & (gains <= 2.0)).all()
    assert len(set(gains.tolist())) == 5
