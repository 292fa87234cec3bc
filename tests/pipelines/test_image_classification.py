"""The photographs' pipeline: what it reads, how it draws, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.samples import StageError
from pipelines import example_photographs, image_classification
from tests.pipelines.odd_photographs import ODD

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


@pytest.fixture(scope="module")
def cat() -> Any:
    return example_photographs.photograph("chelsea.png")


def save(folder: Path, name: str, data: bytes) -> dict[str, Any]:
    path = folder / name
    path.write_bytes(data)
    return {"path": str(path), "label": 0}


class TestSteps:
    def test_a_sample_from_beginning_to_end(self, cat: Any, tmp_path: Path) -> None:
        pipeline = image_classification.build(size=32)
        sample = pipeline.run(save(tmp_path, "cat.jpg", example_photographs.jpeg(cat)), seed=3)
        assert sample["image"].shape == (3, 32, 32)
        assert sample["label"] == 0
        fields = pipeline.fields_at(len(pipeline.stages))
        assert all(fields[name].fixed for name in pipeline.outputs)
        # A photograph of a ginger cat: red outweighs blue, so the channels are in the right order.
        levels = sample["image"] * np.reshape(image_classification.STD, (3, 1, 1))
        levels += np.reshape(image_classification.MEAN, (3, 1, 1))
        assert levels[0].mean() > levels[2].mean() + 0.05


class TestBadFiles:
    def bad(self, cat: Any) -> dict[str, bytes]:
        whole = example_photographs.jpeg(cat)
        progressive = example_photographs.jpeg(cat, progressive=True)
        return {
            "empty": b"",
            "garbage": bytes(range(256)) * 20,
            "header only": whole[:100],
            "cut off": whole[: len(whole) // 2],
            "cut off, progressive": progressive[: len(progressive) // 2],
            "without end": whole[:-2],
            "gif": b"GIF89a" + bytes(100),
        }

    def test_they_fail_while_reading_so_on_every_lane_alike(self, cat: Any, tmp_path: Path) -> None:
        pipeline = image_classification.build(size=16)
        for name, data in self.bad(cat).items():
            fields = save(tmp_path, f"{name}.jpg", data)
            with pytest.raises(StageError, match="stage 'read' failed: ValueError") as caught:
                pipeline.run(fields, 0, stop=pipeline.host_prefix)
            assert caught.value.origin.path == fields["path"]


class TestSettings:
    @pytest.mark.parametrize(
        "settings",
        [
            *({"size": 0}, {"scale": (0.5, 0.1)}, {"scale": (0, 1)}, {"scale": (0.5, 1.5)}),
            *({"ratio": (2, 1)}, {"flip": 1.5}, {"std": (0.1, 0, 0.1)}),
        ],
    )
    def test_nonsense_is_refused(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ValueError):
            image_classification.build(**settings)


class TestImageFolder:
    def test_labels_follow_the_sorted_folders(self, tmp_path: Path) -> None:
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
    (tmp_path / "class").mkdir()
    for number, (what, encoded) in enumerate(ODD.items()):
        (tmp_path / "class" / f"{number:03}.{what.partition(',')[0]}").write_bytes(encoded)
    data: Any = image_classification.ImageFolder(tmp_path)
    runs = []
    for lane in ("cpu", "device"):
        torch.manual_seed(3)
        loader = DataLoader(data, len(ODD), pipeline=image_classification.build(size=32), num_workers=1, lanes=(lane,))
        runs.append(next(iter(loader))["image"])
    level = 1 / 255 / torch.tensor(image_classification.STD)[:, None, None]
    assert len(runs[0]) == len(ODD) and ((runs[0] - runs[1]).abs() / level).max() <= 4
