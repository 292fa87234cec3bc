"""The pipeline that the page of pipelines writes: what it delivers, and that both implementations mean the same."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from minato_gpu import DataLoader
from minato_gpu.lab.cli import main
from tests.support import pages


@pytest.fixture
def recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The page's example as the module that it says it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    pages.run(pages.examples("pipelines/README.md")[0], {}, tmp_path)
    yield importlib.import_module("recordings")
    del sys.modules["recordings"]


def test_it_delivers_a_part_of_each_signal_louder_or_softer(recordings: Any) -> None:
    recordings.example_data("recordings")
    data, pipeline = pickle.loads(pickle.dumps((recordings.dataset("recordings"), recordings.pipeline())))
    signals = [np.load(f"recordings/{number}.npy") for number in range(8)]
    (batch,) = DataLoader(data, batch_size=8, pipeline=pipeline, num_workers=2, lanes=("cpu", "device"))
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
def test_both_implementations_of_it_mean_the_same(recordings: Any, own: bool) -> None:
    data = []
    if own:
        recordings.example_data("mine")
        data = ["--data", "mine"]
    result = CliRunner().invoke(main, ["check", "recordings", *data])
    assert result.exit_code == 0, result.output
    assert "every stage is within its tolerance" in result.output
