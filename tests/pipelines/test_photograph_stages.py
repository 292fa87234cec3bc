"""The standard stages of photographs, put together otherwise than in the pipelines here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from minato_gpu import DataLoader, Pipeline
from minato_gpu.lab import parity
from minato_gpu.lab.cli import main
from pipelines import image_classification, image_stages
from pipelines import photograph_stages as photographs
from tests.support.pages import ROOT


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("photographs")
    image_classification.example_data(folder)
    return image_classification.ImageFolder(folder)


def pipeline(*more: Any) -> Pipeline:
    return Pipeline((photographs.READ, *more), outputs=("image", "label"))


OWN = {
    "evaluation": (photographs.centre_crop(), photographs.decode(), photographs.resize(24), photographs.normalise(24)),
    "whole, oblong": (
        photographs.WHOLE,
        photographs.decode(),
        photographs.flip(None),
        photographs.resize((20, 32)),
        photographs.normalise((20, 32), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ),
    "bytes": (photographs.random_resized_crop(), photographs.decode(), photographs.resize(16), photographs.flip(16, 1)),
}


@pytest.mark.parametrize("name", OWN)
def test_both_lanes_mean_the_same(data: Any, name: str) -> None:
    compared = parity.check(pipeline(*OWN[name]), [data[n] for n in range(0, len(data), 6)])
    assert len(compared) > 3 and all(one.passed for one in compared)


@pytest.mark.parametrize(("name", "shape"), [("evaluation", (3, 24, 24)), ("whole, oblong", (3, 20, 32))])
def test_a_loader_delivers_them(data: Any, name: str, shape: tuple[int, ...]) -> None:
    loader = DataLoader(data, 8, pipeline=pipeline(*OWN[name]), num_workers=1, lanes=("cpu",))
    batch = next(iter(loader))
    assert batch["image"].shape == (8, *shape) and batch["label"].tolist() == data.labels[:8]


@pytest.mark.parametrize(
    ("size", "share", "ratio", "box"),
    [
        ((256, 512), 224 / 256, 1.0, [16, 144, 224, 224]),
        ((300, 200), 1.0, 1.0, [50, 0, 200, 200]),
        ((300, 400), 0.5, 2.0, [100, 100, 100, 200]),
        ((1, 1000), 0.1, 1.0, [0, 499, 1, 1]),
    ],
)
def test_the_middle(size: tuple[int, int], share: float, ratio: float, box: list[int]) -> None:
    placed = image_stages.middle_box({"size": np.array(size, np.int32)}, {}, share=share, ratio=ratio)
    assert placed["box"].tolist() == box and placed["box"].dtype == np.int32


@pytest.mark.parametrize(
    "make",
    [
        *(
            lambda: photographs.centre_crop(1.1),
            lambda: photographs.centre_crop(ratio=0),
            lambda: photographs.flip(8, 2),
        ),
        *(lambda: photographs.resize((8, 0)), lambda: photographs.flip(0), lambda: photographs.normalise((0, 8))),
    ],
)
def test_nonsense_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"must be|needs a"):
        make()


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
