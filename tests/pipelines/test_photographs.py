"""The photographs' pipeline, and its standard stages put together otherwise. And settings that pipelines refuse."""

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
from minato_gpu.samples import StageError
from pipelines import (
    example_photographs,
    image_classification,
    image_stages,
    object_detection,
    segmentation_3d,
    speech_recognition,
)
from pipelines import photograph_stages as stages
from tests.pipelines.odd_photographs import ODD
from tests.support.pages import ROOT


@pytest.fixture(scope="module")
def data(photographs: Path) -> Any:
    return image_classification.ImageFolder(photographs)


def pipeline(*more: Any) -> Pipeline:
    return Pipeline((stages.READ, *more), outputs=("image", "label"))


OWN = {
    "evaluation": (stages.centre_crop(), stages.decode(), stages.resize(24), stages.normalise(24)),
    "whole, oblong": (
        stages.WHOLE,
        stages.decode(),
        stages.flip(None),
        stages.resize((20, 32)),
        stages.normalise((20, 32), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ),
    "bytes": (stages.random_resized_crop(), stages.decode(), stages.resize(16), stages.flip(16, 1)),
}


@pytest.mark.parametrize("name", OWN)
def test_both_lanes_mean_the_same(data: Any, name: str) -> None:
    compared = parity.check(pipeline(*OWN[name]), [data[n] for n in range(0, len(data), 6)])
    assert len(compared) > 3 and all(one.passed for one in compared)


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
            lambda: stages.centre_crop(1.1),
            lambda: stages.centre_crop(ratio=0),
            lambda: stages.flip(8, 2),
        ),
        *(lambda: stages.resize((8, 0)), lambda: stages.flip(0), lambda: stages.normalise((0, 8))),
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


# --- the photographs' pipeline: what it reads, how it draws, and what it refuses -----------------------------------


@pytest.fixture(scope="module")
def cat() -> Any:
    return example_photographs.photograph("chelsea.png")


def save(folder: Path, name: str, data: bytes) -> dict[str, Any]:
    path = folder / name
    path.write_bytes(data)
    return {"path": str(path), "label": 0}


def test_a_sample_from_beginning_to_end(cat: Any, tmp_path: Path) -> None:
    pipeline = image_classification.build(size=32)
    sample = pipeline.run(save(tmp_path, "cat.jpg", example_photographs.jpeg(cat)), seed=3)
    assert sample["image"].shape == (3, 32, 32)
    assert sample["label"] == 0
    fields = pipeline.fields_at(len(pipeline.stages))
    assert all(None not in fields[name].shape for name in pipeline.outputs)
    # A photograph of a ginger cat: red outweighs blue, so the channels are in the right order.
    levels = sample["image"] * np.reshape(image_classification.STD, (3, 1, 1))
    levels += np.reshape(image_classification.MEAN, (3, 1, 1))
    assert levels[0].mean() > levels[2].mean() + 0.05


def test_bad_files_fail_while_reading_so_on_every_lane_alike(cat: Any, tmp_path: Path) -> None:
    whole, progressive = (example_photographs.jpeg(cat, progressive=each) for each in (False, True))
    cut_off = (whole[:100], whole[: len(whole) // 2], progressive[: len(progressive) // 2], whole[:-2])
    pipeline = image_classification.build(size=16)
    for data in (b"", bytes(range(256)) * 20, b"GIF89a" + bytes(100), *cut_off):
        fields = save(tmp_path, "bad.jpg", data)
        with pytest.raises(StageError, match="stage 'read' failed: ValueError") as caught:
            pipeline.run(fields, 0, stop=pipeline.host_prefix)
        assert caught.value.origin.path == fields["path"]


NONSENSE: dict[Any, list[dict[str, Any]]] = {
    image_classification: [
        *({"size": 0}, {"scale": (0.5, 0.1)}, {"scale": (0, 1)}, {"scale": (0.5, 1.5)}),
        *({"ratio": (2, 1)}, {"flip": 1.5}, {"std": (0.1, 0, 0.1)}),
    ],
    object_detection: [
        *({"shorter": 0}, {"shorter": 900, "longest": 800}, {"flip": 1.5}, {"masks": "bitmap"}),
        {"std": (0.1, 0, 0.1)},
    ],
    segmentation_3d: [
        *({"patch": (0, 8, 8)}, {"patch": (8, 8)}, {"oversampling": 1.5}, {"flip": -0.1}),
        *({"brightness": 1.0}, {"noise": -1.0}, {"probability": 2.0}, {"dtype": "int8"}),
    ],
    speech_recognition: [
        *({"rate": 10}, {"speeds": ()}, {"speeds": (1.0, -1.0)}, {"mels": 0}, {"mels": 200}, {"splice": 0}),
        *({"frequency_masks": -1}, {"frequency_width": 81}, {"time_masks": -1}, {"time_width": 1.5}),
    ],
}
"""Settings that each of the four pipelines refuses."""


@pytest.mark.parametrize(
    ("module", "settings"), [(module, each) for module, refused in NONSENSE.items() for each in refused]
)
def test_settings_that_mean_nothing_are_refused(module: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        module.build(**settings)


def test_labels_follow_the_sorted_folders(tmp_path: Path) -> None:
    for name in ("b/two.JPG", "a/one.jpeg", "a/deeper/three.png", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    data = image_classification.dataset(tmp_path)
    assert data.classes == ["a", "b"]
    found = [(Path(data[n]["path"]).name, data[n]["label"]) for n in range(len(data))]
    assert found == [("three.png", 0), ("one.jpeg", 0), ("two.JPG", 1)]
    with pytest.raises(IndexError):
        data[3]


def test_what_is_odd_is_the_same_on_both_lanes(tmp_path: Path) -> None:
    names = [f"{number}.{what.partition(',')[0]}" for number, what in enumerate(ODD)]
    samples = [save(tmp_path, name, encoded) for name, encoded in zip(names, ODD.values(), strict=True)]
    compared = parity.check(image_classification.build(size=32), samples)
    assert all(one.passed for one in compared), compared
