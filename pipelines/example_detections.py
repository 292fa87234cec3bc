"""Writes a small data set of real photographs with objects, as COCO lays it out, for checks and tests: awkward ones.

The photographs lie inside the scikit-image package, so nothing is downloaded; the outlines were drawn by hand. There
are odd sizes, greyscale, progressive coding, an Exif orientation, a large picture and a sliver, an image without
objects, a crowd, an object of two parts, one that reaches beyond its picture, and one of no width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minato_gpu.util.messages import from_extra

from .example_photographs import SUBSAMPLING, jpeg, photograph, with_orientation

with from_extra("pipelines"):
    import cv2

SPLIT = "example"
# As in COCO: not in the order of their ids, and ids are missing.
CATEGORIES = {17: "cat", 1: "person", 47: "cup", 4: "motorcycle", 50: "spoon", 15: "bench"}

Ring = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Scene:
    """A picture, blue first or grey, and its objects: (name of the category, outlines). ``crowd``: a category, of which
    the whole picture is full."""

    picture: Any
    objects: Sequence[tuple[str, Sequence[Ring]]] = ()
    crowd: str = ""
    orientation: int = 1
    progressive: bool = False


def oval(x: float, y: float, across: float, down: float, corners: int = 24) -> list[tuple[float, float]]:
    """The outline of an ellipse around (x, y)."""
    turns = [2 * math.pi * n / corners for n in range(corners)]
    return [(round(x + across * math.cos(a), 2), round(y + down * math.sin(a), 2)) for a in turns]


CAT = [(40, -3), (33, 60), (20, 140), (24, 302), (290, 302), (335, 240), (360, 170), (352, 70), (401.5, -3)]
EYES = [oval(171, 115, 36, 32), oval(319, 137, 24, 27)]
CUP = [(173, 110), (200, 45), (290, 18), (372, 50), (408, 120), (380, 205), (320, 275), (225, 306), (197, 296)]
SPOON = [(398, 68), (425, 72), (387, 235), (406, 270), (390, 318), (345, 326), (325, 290), (350, 245), (380, 205)]
ASTRONAUT = [(155, 90), (190, 22), (270, 25), (300, 90), (250, 180), (345, 265), (360, 350), (280, 512), (25, 512)]
PHOTOGRAPHER = [(160, 90), (215, 62), (270, 115), (245, 195), (325, 170), (290, 290), (150, 400), (150, 512), (0, 512)]
MOTORCYCLE = [(95, 200), (240, 170), (520, 90), (560, 180), (645, 290), (683, 390), (640, 450), (330, 435), (125, 370)]
BENCH = [(40, 90), (280, 105), (285, 190), (60, 310), (38, 300)]


def scenes() -> dict[str, Scene]:
    """The data set's pictures by name."""
    cat, coffee, astronaut = (photograph(f"{name}.png") for name in ("chelsea", "coffee", "astronaut"))
    cup = ("cup", [CUP])
    return {
        "cat": Scene(cat, [("cat", [CAT]), ("cat", EYES)]),
        "coffee": Scene(coffee, [("spoon", [SPOON]), cup], progressive=True),
        "portrait": Scene(coffee[:399, 160:437], [("cup", [_moved(CUP, -160, 0)])]),
        "turned": Scene(astronaut[:, :407], [("person", [ASTRONAUT])], orientation=6),
        "motorcycle": Scene(photograph("motorcycle_left.png"), [("motorcycle", [MOTORCYCLE]), ("bench", [BENCH])]),
        "photographer": Scene(photograph("camera.png"), [("person", [PHOTOGRAPHER])]),
        "coins": Scene(photograph("coins.png"), [("cup", [oval(335, 43, 29, 27)])], crowd="cup"),
        "moon": Scene(photograph("moon.png")),
        "sliver": Scene(cat[95:136, 30:391], [("cat", [_moved(ring, -30, -95) for ring in EYES])]),
        "large": Scene(_enlarged(cat, 4), [("cat", [[(4 * x, 4 * y) for x, y in CAT]])]),
    }


def write(directory: str | Path) -> None:
    """Writes ``directory``/annotations/instances_example.json and ``directory``/example/*.jpg, replacing such files."""
    directory = Path(directory)
    folder = directory / SPLIT
    folder.mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, (name, scene) in enumerate(scenes().items()):
        (folder / f"{name}.jpg").write_bytes(_encoded(scene, number))
        height, width = scene.picture.shape[:2]
        image = {"id": 1000 - 7 * number, "file_name": f"{name}.jpg", "height": height, "width": width}
        images.append(image)
        annotations += _annotations(image["id"], scene)
    # Annotations are not in the order of the images, as in COCO.
    annotations = annotations[::2] + annotations[1::2]
    for number, annotation in enumerate(annotations):
        annotation["id"] = 500 + number
    document = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": number, "name": name} for number, name in CATEGORIES.items()],
    }
    (directory / "annotations").mkdir(exist_ok=True)
    (directory / "annotations" / f"instances_{SPLIT}.json").write_text(json.dumps(document), encoding="utf-8")


def _annotations(image: Any, scene: Scene) -> list[dict[str, Any]]:
    ids = {name: number for number, name in CATEGORIES.items()}
    height, width = scene.picture.shape[:2]
    found = []
    for category, rings in scene.objects:
        corners = [corner for ring in rings for corner in ring]
        left, top = (min(corner[axis] for corner in corners) for axis in (0, 1))
        right, bottom = (max(corner[axis] for corner in corners) for axis in (0, 1))
        found.append(
            {
                "image_id": image,
                "category_id": ids[category],
                "bbox": [left, top, right - left, bottom - top],
                "segmentation": [[value for corner in ring for value in corner] for ring in rings],
                "iscrowd": 0,
            }
        )
    if scene.crowd:
        runs = {"counts": [0, height * width], "size": [height, width]}
        place = {"image_id": image, "category_id": ids[scene.crowd], "bbox": [0, 0, width, height]}
        found.append({**place, "segmentation": runs, "iscrowd": 1})
        # And an object of no width, as there are a few in COCO.
        found.append({**place, "bbox": [5, 5, 0, 9], "segmentation": [[5, 5, 5, 9, 5, 14]], "iscrowd": 0})
    return found


def _encoded(scene: Scene, number: int) -> bytes:
    stored = cv2.rotate(scene.picture, cv2.ROTATE_90_COUNTERCLOCKWISE) if scene.orientation == 6 else scene.picture
    data = jpeg(stored, SUBSAMPLING[number % 3], progressive=scene.progressive)
    return data if scene.orientation == 1 else with_orientation(data, scene.orientation)


def _moved(ring: Ring, right: float, down: float) -> Ring:
    return [(x + right, y + down) for x, y in ring]


def _enlarged(picture: Any, times: int) -> Any:
    return cv2.resize(picture, None, fx=times, fy=times, interpolation=cv2.INTER_CUBIC)
