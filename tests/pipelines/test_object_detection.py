"""The detector's pipeline: boxes and polygons go where the picture goes, and batches are padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from minato_gpu.samples import StageError
from pipelines import detection_stages, object_detection
from pipelines.coco import CocoDetection
from pipelines.example_detections import write
from pipelines.example_photographs import with_orientation


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("example")
    write(folder)
    return CocoDetection.in_folder(folder, keep_empty=True)


def painted(folder: Path, orientation: int = 1) -> dict[str, Any]:
    """A black picture with a white rectangle, left of the middle and above it, as an item of the data set."""
    picture = np.zeros((90, 130, 3), np.uint8)
    picture[10:40, 21:52] = 255
    path = folder / f"painted{orientation}.jpg"
    encoded = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 98])[1].tobytes()
    path.write_bytes(with_orientation(encoded, orientation))
    corners = np.array([[21, 10], [52, 10], [52, 40], [21, 40]], np.float32)
    return {
        "path": str(path),
        "image_id": 3,
        "declared": np.array([90, 130], np.int32),
        "boxes": np.array([[21, 10, 52, 40]], np.float32),
        "labels": np.array([1], np.int64),
        "points": corners,
        "rings": np.array([[0, 4]], np.int32),
    }


@pytest.mark.parametrize("flip", [0.0, 1.0])
@pytest.mark.parametrize(("shorter", "longest"), [(203, 999), (41, 999), (500, 170)])
def test_objects_stay_on_what_they_outline(tmp_path: Path, flip: float, shorter: int, longest: int) -> None:
    shorter = min(shorter, longest)
    pipeline = object_detection.build(shorter, longest, flip=flip, masks="bitmaps")
    sample = pipeline.run(painted(tmp_path), 0)
    white = sample["image"].mean(axis=0) > 0.1  # black is -2.0, white 2.4
    assert white.shape == tuple(sample["shape"])
    rows, columns = np.flatnonzero(white.any(axis=1)), np.flatnonzero(white.any(axis=0))
    seen = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
    assert sample["boxes"][0] == pytest.approx(seen, abs=1.01)
    assert (seen[0] > white.shape[1] - seen[2]) == bool(flip)  # it lay left of the middle
    both, either = (white & sample["masks"][0] > 0).sum(), (white | sample["masks"][0] > 0).sum()
    assert both / either > (0.95 if shorter > 100 else 0.8)


@pytest.mark.parametrize(
    ("ring", "rows", "columns"),
    [
        ([[2, 5], [7, 5], [7, 3], [2, 3]], slice(3, 5), slice(2, 7)),
        ([[-9, -9], [99, -9], [99, 99], [-9, 99]], slice(0, 9), slice(0, 11)),
        ([[20, 2], [25, 2], [25, 6], [20, 6]], slice(0, 0), slice(0, 0)),
        ([[2, 3.6], [9, 3.6], [9, 4.4], [2, 4.4]], slice(0, 0), slice(0, 0)),  # between two rows of centres
    ],
)
def test_filling_rectangles(ring: list[list[float]], rows: slice, columns: slice) -> None:
    expected = np.zeros((9, 11), np.uint8)
    expected[rows, columns] = 1
    mask = np.zeros((9, 11), np.uint8)
    detection_stages.fill(mask, np.array(ring, np.float32))
    assert np.array_equal(mask, expected)


def test_rings_of_one_object_are_united() -> None:
    square = np.array([[0, 0], [6, 0], [6, 6], [0, 6]], np.float32)
    fields = {
        "shape": np.array([10, 10], np.int32),
        "boxes": np.zeros((2, 4), np.float32),
        "points": np.concatenate([square, square + 3, square]),
        "rings": np.array([[1, 4], [1, 4], [0, 4]], np.int32),
    }
    masks = detection_stages.draw_masks(fields, {})["masks"]
    assert [int(mask.sum()) for mask in masks] == [36, 36 + 36 - 9]
    fields["rings"] = fields["rings"][:2]
    with pytest.raises(ValueError, match="object 0 has no polygon"):
        detection_stages.draw_masks(fields, {})


class TestBatches:
    def batch(self, data: Any, **settings: Any) -> tuple[list[Any], Any]:
        samples = [object_detection.build(100, 150).run(data[n], n) for n in (0, 3, 4, 5)]
        return samples, object_detection.pad_batch(samples, **settings)

    def test_pictures_are_padded_with_zeros(self, data: Any) -> None:
        samples, batch = self.batch(data)
        shapes = [sample["image"].shape[1:] for sample in samples]
        assert len(set(shapes)) > 2
        height, width = (32 * -(-max(sizes) // 32) for sizes in zip(*shapes, strict=True))
        assert batch["image"].shape == (4, 3, height, width) and batch["image"].dtype == torch.float32
        for image, sample, (h, w) in zip(batch["image"].numpy(), samples, shapes, strict=True):
            assert np.array_equal(image[:, :h, :w], sample["image"])
            assert (image[:, h:] == 0).all() and (image[:, :, w:] == 0).all()
        assert batch["shape"].dtype == torch.int64 and batch["shape"].tolist() == [list(shape) for shape in shapes]

    def test_the_divisor(self, data: Any) -> None:
        assert self.batch(data, divisor=64)[1]["image"].shape[2:] == (128, 192)
        assert self.batch(data, divisor=1)[1]["image"].shape[2:] == (100, 150)
        with pytest.raises(ValueError, match="divisor"):
            self.batch(data, divisor=0)


def test_a_picture_that_lies_on_its_side(tmp_path: Path) -> None:
    item = painted(tmp_path, orientation=6)
    with pytest.raises(StageError, match=r"90 x 130 pixels.*for 130 x 90; boxes must refer .* Exif orientation"):
        object_detection.build().run(item, 0)
