"""The demonstration's data set: real photographs of very different sizes, made once."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from minato_gpu.demo import photographs

COUNT = 24
FEW = 15  # one for each class


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photographs") / "data"
    photographs.make(folder, COUNT, seed=3)
    return folder


def _files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.jpg")}


def _decoded(data: bytes) -> npt.NDArray[np.uint8]:
    return np.asarray(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), dtype=np.uint8)


def test_every_class_has_files_and_every_file_is_a_jpeg(made: Path) -> None:
    assert len(_files(made)) == COUNT
    assert {entry.name for entry in made.iterdir() if entry.is_dir()} == set(photographs.SOURCES)
    for data in _files(made).values():
        assert data[:2] == b"\xff\xd8"
        assert _decoded(data).shape[2] == 3


def test_sizes_differ_by_more_than_fifty_times(made: Path) -> None:
    pixels = [_decoded(data).shape[0] * _decoded(data).shape[1] for data in _files(made).values()]
    assert max(pixels) / min(pixels) > 50


def test_sizes_of_a_full_data_set_are_log_normal_within_the_limits() -> None:
    sizes = np.array([view.megapixels for view in photographs.views(960, seed=0)])
    assert sizes.min() == photographs.SMALLEST_MEGAPIXELS
    assert sizes.max() == photographs.LARGEST_MEGAPIXELS
    logs = np.log(sizes)
    assert np.median(logs) == pytest.approx(np.log(photographs.MEDIAN_MEGAPIXELS), abs=0.02)
    assert logs.std() == pytest.approx(photographs.SIGMA, abs=0.05)


def test_the_same_seed_makes_the_same_files(made: Path, tmp_path: Path) -> None:
    photographs.make(tmp_path / "again", COUNT, seed=3)
    assert _files(tmp_path / "again") == _files(made)


def test_another_seed_makes_other_files(made: Path, tmp_path: Path) -> None:
    photographs.make(tmp_path / "other", FEW, seed=4)
    assert not set(_files(tmp_path / "other").values()) & set(_files(made).values())


def test_a_finished_data_set_is_used_again(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    first = photographs.make(tmp_path / "data", FEW, 0, lambda done, count: calls.append((done, count)))
    assert calls == [(done, FEW) for done in range(1, FEW + 1)]
    calls.clear()
    again = photographs.make(tmp_path / "data", FEW, 0, lambda done, count: calls.append((done, count)))
    assert calls == []
    assert again == first


@pytest.mark.parametrize("change", ["count", "seed", "file lost"])
def test_a_data_set_that_is_not_the_one_asked_for_is_made_anew(tmp_path: Path, change: str) -> None:
    folder = tmp_path / "data"
    photographs.make(folder, FEW, 0)
    if change == "file lost":
        next(folder.rglob("*.jpg")).unlink()
    count, seed = (FEW + 1 if change == "count" else FEW), (1 if change == "seed" else 0)
    manifest = photographs.make(folder, count, seed)
    assert len(_files(folder)) == count
    assert manifest["seed"] == seed


def test_what_an_interrupted_run_left_is_no_data_set(tmp_path: Path) -> None:
    def stop(done: int, count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        photographs.make(tmp_path / "data", FEW, 0, stop)
    assert not (tmp_path / "data").exists()
    photographs.make(tmp_path / "data", FEW, 0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("keep me")
    with pytest.raises(photographs.DataSetError, match="was not made by the demonstration"):
        photographs.make(tmp_path / "data", FEW, 0)
    assert (tmp_path / "data" / "thesis.txt").read_text() == "keep me"


def test_too_few_files_for_the_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(photographs.DataSetError, match="at least 15 files"):
        photographs.make(tmp_path / "data", 14, 0)


def test_opencv_keeps_its_number_of_threads(tmp_path: Path) -> None:
    before = cv2.getNumThreads()
    photographs.make(tmp_path / "data", 15, 0)
    assert cv2.getNumThreads() == before
