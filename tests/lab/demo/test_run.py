"""``minato-gpu demo`` at toy size: the figures that it leaves add up; and its data set, real photographs of very
different sizes, made once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from minato_gpu.lab.cli import main
from minato_gpu.lab.demo import photographs
from minato_gpu.lab.demo.training import Tally

COUNT, EPOCHS = 24, 2
FEW = 15  # photographs, one for each class


def _demo(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["demo", "--batch-size", "8", *map(str, arguments)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("demo")
    return out, _demo("--out", out, "--size", str(COUNT), "--epochs", str(EPOCHS), "--json", out / "copy.json")


@pytest.fixture(scope="module")
def left(finished: tuple[Path, Result]) -> dict[str, Any]:
    out, result = finished
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return document


def test_every_sample_arrives_and_is_counted_on_its_lane(left: dict[str, Any]) -> None:
    assert left["samples_expected"] == left["samples_delivered"] == COUNT * EPOCHS
    assert left["every_sample_once"] is True
    assert left["samples_by_lane"].keys() == {"cpu", "device"}
    assert sum(left["samples_by_lane"].values()) == COUNT * EPOCHS


def test_the_rows_are_the_epochs_and_add_up_to_the_totals(left: dict[str, Any]) -> None:
    rows = left["rows"]
    assert [row["epoch"] for row in rows] == list(range(EPOCHS))
    assert sum(row["samples_delivered"] for row in rows) == left["samples_delivered"]
    assert sum(row["samples_cpu_lane"] for row in rows) == left["samples_by_lane"]["cpu"]
    assert left["samples_per_s"] == pytest.approx(left["samples_delivered"] / sum(row["elapsed_s"] for row in rows))
    for row in rows:
        assert row["wait_p99_s"] <= row["wait_total_s"] <= row["elapsed_s"]
        assert 0 < row["first_batch_s"] <= row["elapsed_s"]
    assert left["first_batch_s"] == rows[0]["first_batch_s"]
    assert left["final_loss"] == rows[-1]["loss"] and np.isfinite(left["final_loss"])


def test_the_results_are_a_picture_a_table_and_one_document(
    finished: tuple[Path, Result], left: dict[str, Any]
) -> None:
    out, result = finished
    assert (out / "timeline.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert json.loads((out / "copy.json").read_text()) == left
    assert left.keys() >= {"date", "machine", "versions", "settings", "rows"}
    assert "What the loader did" in result.output


def test_the_users_own_folder_is_read_and_not_touched(tmp_path: Path) -> None:
    data = tmp_path / "mine"
    for number in range(13):
        folder = data / ("cats" if number % 3 else "dogs")
        folder.mkdir(parents=True, exist_ok=True)
        picture = np.random.default_rng(number).integers(0, 256, (40 + number, 57, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / f"{number}.{'png' if number % 2 else 'jpg'}"), picture)
    before = sorted(data.rglob("*"))
    result = _demo("--data", data, "--out", tmp_path / "out", "--epochs", "1")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["samples_delivered"] == 13
    assert sorted(data.rglob("*")) == before
    assert not (tmp_path / "out" / "data").exists()


@pytest.mark.parametrize(("name", "said"), [("broken.jpg", "broken.jpg"), ("notes.txt", "has no class folders")])
def test_what_is_no_photograph_is_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "mine" / "cats").mkdir(parents=True)
    (tmp_path / "mine" / "cats" / name).write_bytes(b"\xff\xd8 no photograph")
    result = _demo("--data", tmp_path / "mine", "--out", tmp_path / "out", "--epochs", "1")
    assert result.exit_code == 1
    assert said in result.output
    assert "Traceback (most recent call last)" not in result.output


# --- the consumer's own count ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "complete"),
    [([0, 0, 1, 1], True), ([0, 0, 1], False), ([0, 0, 1, 1, 1], False), ([0, 0, 0, 1], False)],
    ids=["all", "one lost", "one twice", "one for another"],
)
def test_an_epoch_is_complete_when_every_class_came_as_often_as_it_has_samples(
    labels: list[int], complete: bool
) -> None:
    tally = Tally(0, torch.tensor([2, 2]), torch.zeros(2, dtype=torch.int64))
    for label in labels:  # the model always says class 0
        tally.add(torch.tensor([label]), torch.tensor([[1.0, 0.0]]), loss=float(label))
    assert tally.complete is complete and tally.samples == len(labels)
    assert tally.accuracy == labels.count(0) / len(labels) and tally.loss == sum(labels) / len(labels)


# --- the photographs ------------------------------------------------------------------------------------------------


def test_every_class_has_files_and_every_file_is_a_jpeg(finished: tuple[Path, Result]) -> None:
    files = [*(finished[0] / "data").rglob("*.jpg")]
    assert len(files) == COUNT and {file.parent.name for file in files} == set(photographs.SOURCES)
    pixels = []
    for file in files:
        assert file.read_bytes()[:2] == b"\xff\xd8"
        height, width, _ = np.asarray(cv2.imread(str(file))).shape
        pixels.append(height * width)
    assert max(pixels) / min(pixels) > 50


@pytest.mark.parametrize("change", ["nothing", "count", "seed", "file lost"])
def test_a_data_set_that_is_not_the_one_asked_for_is_made_anew(tmp_path: Path, change: str) -> None:
    folder = tmp_path / "data"
    photographs.make(folder, FEW, 0)
    made = folder.stat().st_ino
    if change == "file lost":
        next(folder.rglob("*.jpg")).unlink()
    count, seed = (FEW + 1 if change == "count" else FEW), (1 if change == "seed" else 0)
    assert photographs.make(folder, count, seed)["seed"] == seed
    assert len([*folder.rglob("*.jpg")]) == count
    assert (folder.stat().st_ino == made) == (change == "nothing")


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("keep me")
    with pytest.raises(photographs.DataSetError, match="was not made by the demonstration"):
        photographs.make(tmp_path / "data", FEW, 0)
    assert (tmp_path / "data" / "thesis.txt").read_text() == "keep me"


def test_too_few_files_for_the_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(photographs.DataSetError, match="at least 15 files"):
        photographs.make(tmp_path / "data", 14, 0)
