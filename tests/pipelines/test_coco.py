"""COCO's annotation document: what an item holds, what is left out, and what is said about a broken one."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipelines.coco import CocoDetection

SQUARE = [1, 1, 5, 1, 5, 5, 1, 5]
TRIANGLE = [8, 2, 12.5, 2, 12.5, 9]


def annotation(
    number: int, image: int, category: int, bbox: Sequence[float], *rings: Sequence[float], **other: Any
) -> Any:
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "bbox": list(bbox),
        "segmentation": [list(ring) for ring in rings],
        "iscrowd": 0,
        **other,
    }


def document() -> dict[str, Any]:
    """Three images, the one with the lowest id last; its objects are not next to each other."""
    return {
        "images": [
            {"id": 70, "file_name": "b.jpg", "height": 40, "width": 60},
            {"id": 80, "file_name": "deep/c.jpg", "height": 10, "width": 10},
            {"id": 9, "file_name": "a.jpg", "height": 20, "width": 30},
        ],
        "annotations": [
            annotation(1, 9, 5, [1, 1, 4, 4], SQUARE),
            annotation(2, 70, 2, [-3, 10.5, 13, 100], [0, 10, 10, 10, 10, 40]),
            annotation(3, 80, 2, [0, 0, 9, 9], iscrowd=1, segmentation={"counts": [0, 100], "size": [10, 10]}),
            annotation(4, 9, 2, [1, 1, 11.5, 8], SQUARE, TRIANGLE),
            annotation(5, 9, 2, [29, 5, 0, 5], [29, 5, 29, 10, 29, 7]),
            annotation(6, 9, 2, [31, 5, 9, 5], SQUARE),
            annotation(7, 80, 2, [1, 1, 5, 5], [1, 1, 5, 5]),
        ],
        "categories": [{"id": 5, "name": "dog"}, {"id": 2, "name": "bird"}],
    }


def save(root: Path, content: Any, name: str = "mine") -> Path:
    """The document in COCO's layout, without pictures."""
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / "annotations").mkdir(exist_ok=True)
    path = root / "annotations" / f"instances_{name}.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def opened(root: Path, content: Any, **settings: Any) -> CocoDetection:
    return CocoDetection(root / "mine", save(root, content), **settings)


def test_items_hold_what_the_document_says(tmp_path: Path) -> None:
    data = opened(tmp_path, document())
    assert len(data) == 2 and data.image_ids.tolist() == [9, 70]
    first, second = data[0], data[-1]
    assert first["path"] == str(tmp_path / "mine" / "a.jpg") and second["path"] == str(tmp_path / "mine" / "b.jpg")
    assert (first["image_id"], second["image_id"]) == (9, 70)
    assert first["declared"].tolist() == [20, 30]
    assert first["boxes"].tolist() == [[1, 1, 5, 5], [1, 1, 12.5, 9]]
    assert second["boxes"].tolist() == [[0, 10.5, 10, 40]], "they end where their picture does"
    assert data.classes == ["background", "bird", "dog"] and data.category_ids[1:] == [2, 5]
    assert first["labels"].tolist() == [2, 1] and second["labels"].tolist() == [1]
    assert first["rings"].tolist() == [[0, 4], [1, 4], [1, 3]]
    assert first["points"].reshape(-1).tolist() == [*SQUARE, *SQUARE, *TRIANGLE]
    assert second["rings"].tolist() == [[0, 3]] and second["points"].tolist() == [[0, 10], [10, 10], [10, 40]]
    dtypes = {name: str(first[name].dtype) for name in ("declared", "boxes", "labels", "points", "rings")}
    assert list(dtypes.values()) == ["int32", "float32", "int64", "float32", "int32"]
    with pytest.raises(IndexError):
        data[2]


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    data = opened(tmp_path, document())
    assert data.left_out == {"crowds": 1, "run-length masks": 0, "degenerate objects": 3, "images without objects": 1}
    data = opened(tmp_path, document(), keep_empty=True)
    assert data.left_out["images without objects"] == 0
    assert [data[n]["image_id"] for n in range(len(data))] == [9, 70, 80]
    empty = data[2]
    assert empty["path"] == str(tmp_path / "mine" / "deep" / "c.jpg")
    shapes = {name: empty[name].shape for name in ("boxes", "labels", "points", "rings")}
    assert list(shapes.values()) == [(0, 4), (0,), (0, 2), (0, 2)]


@pytest.mark.parametrize("crowd", [0, "0", 0.0, False, None])
def test_a_run_length_mask_of_no_crowd_leaves_its_box(tmp_path: Path, crowd: Any) -> None:
    runs = {"counts": [0, 100], "size": [20, 30]}
    data = opened(tmp_path, changed(lambda d: d["annotations"][0].update(segmentation=runs, iscrowd=crowd)))
    assert data.left_out["run-length masks"] == 1 and data.left_out["crowds"] == 1
    assert data[0]["boxes"].tolist() == [[1, 1, 5, 5], [1, 1, 12.5, 9]]
    assert data[0]["rings"].tolist() == [[1, 4], [1, 3]]


def test_images_alone_need_keep_empty(tmp_path: Path) -> None:
    content = {**document(), "annotations": []}
    with pytest.raises(ValueError, match=r"instances_mine\.json.*no image has an object.*keep_empty"):
        opened(tmp_path, content)
    data = opened(tmp_path, content, keep_empty=True)
    assert len(data) == 3 and data[1]["boxes"].shape == (0, 4) and data[1]["rings"].shape == (0, 2)


def test_nothing_is_held_for_each_annotation(tmp_path: Path) -> None:
    """Objects that the collector knows would be copied into every forked worker; arrays are shared."""
    content = document()
    content["annotations"] = [annotation(n, 9, 2, [1, 1, 4, 4], SQUARE, TRIANGLE) for n in range(3000)]
    path = save(tmp_path, content)
    gc.collect()
    before = len(gc.get_objects())
    data = CocoDetection(tmp_path / "mine", path)
    gc.collect()
    assert len(gc.get_objects()) - before < 300
    assert len(data[0]["labels"]) == 3000


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    content = document()
    change(content)
    return content


WRONG = {
    "not JSON": (b'{"images": [', "it is not JSON"),
    "a list": ([1, 2], "it must hold an object with images, annotations and categories"),
    "no images": (changed(lambda d: d.pop("images")), "it has no 'images'; COCO's detection annotations are in"),
    "no size": (changed(lambda d: d["images"][2].pop("width")), "image 9 has no 'width'"),
    "no area": (changed(lambda d: d["images"][2].update(width=0)), "image 9 is declared to be 0 x 20 pixels"),
    "no int32": (changed(lambda d: d["images"][2].update(width=2**31)), "image 9 is declared to be 2147483648 x 20"),
    "no float32": (
        changed(lambda d: d["annotations"][1].update(segmentation=[[0, 1e39, 10, 10, 10, 40]])),
        "image 70 has an object with a polygon whose points are beyond float32",
    ),
    "two images": (changed(lambda d: d["images"][0].update(id=9)), "two images have the id 9"),
    "two categories": (changed(lambda d: d["categories"][0].update(id=2)), "two categories have the same id"),
    "unknown image": (
        changed(lambda d: d["annotations"][1].update(image_id=71)),
        "annotation 2 is of image 71, which is not among the images",
    ),
    "unknown category": (
        changed(lambda d: d["annotations"][1].update(category_id=1)),
        "annotation 2 is of category 1, which is not among the categories",
    ),
    "no category": (changed(lambda d: d["annotations"][1].pop("category_id")), "annotation 2 has no 'category_id'"),
    "no box": (changed(lambda d: d["annotations"][3].pop("bbox")), "annotation 4 has no 'bbox'"),
    "box without end": (
        changed(lambda d: d["annotations"][3].update(bbox=[1, 2, 3, float("nan")])),
        "annotation 4 has a 'bbox'",
    ),
    "an id beyond int64": (
        changed(lambda d: d["images"][0].update(id=2**63)),
        "image 9223372036854775808 has an 'id' that an int64 does not hold: number the images anew",
    ),
    "odd crowd": (
        changed(lambda d: d["annotations"][0].update(iscrowd="no")),
        "annotation 1 has 'no' as 'iscrowd', not 0 or 1",
    ),
    "odd polygon": (
        changed(lambda d: d["annotations"][0].update(segmentation=[[1, 2, 3, 4, 5, 6, 7]])),
        "annotation 1 has a 'segmentation' that is not a list of polygons",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_document_is_said(tmp_path: Path, case: str) -> None:
    content, message = WRONG[case]
    with pytest.raises(ValueError, match=rf"instances_mine\.json': .*{message}"):
        opened(tmp_path, content)


def test_cocos_layout_is_found(tmp_path: Path) -> None:
    save(tmp_path, document(), "val2017")
    assert CocoDetection.in_folder(tmp_path)[0]["path"] == str(tmp_path / "val2017" / "a.jpg")
    save(tmp_path, {**document(), "annotations": document()["annotations"][:1]}, "train2017")
    with pytest.raises(ValueError, match="several splits: train2017, val2017; name one"):
        CocoDetection.in_folder(tmp_path)
    assert len(CocoDetection.in_folder(tmp_path, "train2017")) == 1
    assert len(CocoDetection.in_folder(tmp_path, "train2017", keep_empty=True)) == 3
    with pytest.raises(FileNotFoundError, match="no split 'test2017'; there is train2017, val2017"):
        CocoDetection.in_folder(tmp_path, "test2017")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no annotations/instances_NAME\.json"):
        CocoDetection.in_folder(tmp_path)
    path = save(tmp_path, document())
    with pytest.raises(FileNotFoundError, match=r"no folder of images .*absent"):
        CocoDetection(tmp_path / "absent", path)
    with pytest.raises(FileNotFoundError, match=r"no annotation file .*absent\.json"):
        CocoDetection(tmp_path / "mine", tmp_path / "absent.json")
    (tmp_path / "mine").rmdir()
    with pytest.raises(FileNotFoundError, match="no folder of images"):
        CocoDetection.in_folder(tmp_path)
