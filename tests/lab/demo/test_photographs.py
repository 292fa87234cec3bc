"""The demonstration's data set, real photographs of very different sizes, made once; and its picture of a timeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from minato_gpu.lab.demo import photographs, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    pixels = [_decoded(data).shape[0] * _decoded(data).shape[1] for data in _files(made).values()]
    assert max(pixels) / min(pixels) > 50


def test_sizes_of_a_full_data_set_are_log_normal_within_the_limits() -> None:
    sizes = np.array([view.megapixels for view in photographs.views(960, seed=0)])
    assert sizes.min() == photographs.SMALLEST_MEGAPIXELS
    assert sizes.max() == photographs.LARGEST_MEGAPIXELS
    logs = np.log(sizes)
    assert np.median(logs) == pytest.approx(np.log(photographs.MEDIAN_MEGAPIXELS), abs=0.02)
    assert logs.std() == pytest.approx(photographs.SIGMA, abs=0.05)


def test_a_finished_data_set_is_used_again(tmp_path: Path) -> None:
    first = photographs.make(tmp_path / "data", FEW, 0)
    made = (tmp_path / "data").stat().st_ino
    assert photographs.make(tmp_path / "data", FEW, 0) == first and (tmp_path / "data").stat().st_ino == made


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


def test_what_an_interrupted_run_left_is_no_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> tuple[int, int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(photographs, "_write", stop)
        with pytest.raises(KeyboardInterrupt):
            photographs.make(tmp_path / "data", FEW, 0)
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


# --- the picture of a timeline ----------------------------------------------------------------------------------------

# Ten seconds: cpu slot 0 works for six of them, once on a slow sample; the device for half; the consumer waits 1 + 2.
TIMELINE: dict[str, Any] = {
    "spans": [
        (0.0, 2.0, "cpu", 0, 0, 0, 8, False),
        (2.0, 5.0, "cpu", 0, 0, 8, 1, True),
        (9.0, 10.0, "cpu", 0, 1, 0, 8, False),
        (5.0, 10.0, "device", 0, 0, 9, 16, False),
    ],
    "batches": [(1.0, 0, 0, 16, 1.0), (10.0, 0, 1, 9, 2.0)],
}


def _bars(axis: Axes, colour: str) -> list[tuple[float, float]]:
    """(start, end) in seconds of all bars of one colour."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_hex

    found = []
    for collection in axis.collections:
        if not isinstance(collection, PolyCollection):
            continue
        if to_hex(np.asarray(collection.get_facecolor())[0]) == colour:
            corners = [np.asarray(path.vertices) for path in collection.get_paths()]
            found += [(float(xy[:, 0].min()), float(xy[:, 0].max())) for xy in corners]
    return found


@pytest.fixture
def axis() -> Axes:
    return picture.figure([TIMELINE], "title").axes[0]


def test_a_row_for_every_slot_and_the_consumer_with_its_share(axis: Axes) -> None:
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ["cpu slot 0", "device slot 0", "consumer"]
    assert [text.get_text().strip() for text in axis.texts] == ["60% busy", "50% busy", "30% waiting"]
    assert axis.get_title(loc="left") == "epoch 1 of 1: 25 samples in 10.0 s"


def test_slow_samples_have_a_mark_and_waits_their_colour(axis: Axes) -> None:
    assert [np.asarray(line.get_xdata()).tolist() for line in axis.lines] == [[3.5], []]
    assert _bars(axis, "#4c78a8") == [(0.0, 2.0), (2.0, 5.0), (9.0, 10.0)]
    assert _bars(axis, "#c8374a") == [(0.0, 1.0), (8.0, 10.0)]


def test_an_empty_timeline_and_several_epochs_make_a_png(tmp_path: Path) -> None:
    picture.draw([TIMELINE, {"spans": [], "batches": []}], tmp_path / "timeline.png", "title")
    data = (tmp_path / "timeline.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(data) > 10_000
