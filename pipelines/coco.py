"""COCO's detection annotations as a map-style data set: pictures with boxes, classes and polygons.

The format: Lin et al., "Microsoft COCO: Common objects in context", ECCV 2014, and cocodataset.org, "Data format". One
JSON document lists images, annotations and categories. A box is left, top, width, height and a polygon x, y, x, y, ...,
both in pixels from the picture's upper left corner: the pixel in column 3 reaches from x = 3 to x = 4.

What is left out, counted in ``CocoDetection.left_out`` and said once: crowds (run-length regions of many objects, which
training references leave out too), run-length masks of other objects, whose boxes are kept, objects that have no width
or height within their picture or whose polygons enclose nothing, and images of which nothing remains.

Decision: the document becomes a few flat arrays once. Lists of Python objects would be copied, page by page, into every
forked worker as soon as it counts references to them; COCO's training set has 860,000 annotations.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minato_gpu import Source

from . import coco_document
from .coco_document import Objects, Pictures
from .files import say_left_out


class CocoDetection:
    """The pictures of the folder ``images`` with the objects of the file ``annotations`` (``instances_*.json``).

    Items, in the order of the images' ids, are dicts of arrays of their own:

    - "path": str; "image_id": int, COCO's; "declared": int32 (2,), height and width that the document gives.
    - "boxes": float32 (n, 4): left, top, right, bottom, within the picture; "labels": int64 (n,).
    - "points": float32 (k, 2), x and y of all polygons one after the other; "rings": int32 (m, 2), for each polygon its
      object's number (0 to n - 1) and how many points it has. An object may have several rings, or none.

    A label is an index into ``classes`` (names) and ``category_ids`` (COCO's). Categories are numbered from 1 in the
    order of their ids; 0 is the background. Images without objects are left out unless ``keep_empty``.

    Raises FileNotFoundError where the folder or the file is missing, and ValueError, naming the file and the annotation
    and what to do, for a document that is not what it should be. Pictures are not looked for until they are read.
    """

    def __init__(
        self, images: str | os.PathLike[str], annotations: str | os.PathLike[str], *, keep_empty: bool = False
    ) -> None:
        self.images, self.annotations = Path(images), Path(annotations)
        if not self.images.is_dir():
            raise FileNotFoundError(f"there is no folder of images {str(self.images)!r}")
        if not self.annotations.is_file():
            raise FileNotFoundError(f"there is no annotation file {str(self.annotations)!r}")
        try:
            pictures, self.category_ids, self.classes, objects = coco_document.read(self.annotations)
            self._arrange(pictures, objects, keep_empty)
        except ValueError as error:
            raise ValueError(f"{str(self.annotations)!r}: {error}") from None
        say_left_out(self.annotations, self.left_out, "keep_empty=True keeps images without objects")

    @classmethod
    def in_folder(
        cls, root: str | os.PathLike[str], split: str | None = None, *, keep_empty: bool = False
    ) -> CocoDetection:
        """The data set in COCO's own layout: ``root``/annotations/instances_NAME.json with pictures in ``root``/NAME.

        ``split``: NAME, such as "train2017"; may be left out where there is only one. Raises FileNotFoundError where
        there is none or not this one, and ValueError where one must be named; both list what is there.
        """
        files = sorted((Path(root) / "annotations").glob("instances_*.json"))
        names = [file.stem.removeprefix("instances_") for file in files]
        if not names:
            raise FileNotFoundError(f"{str(root)!r} has no annotations/instances_NAME.json, as COCO lays it out")
        if split is None and len(names) > 1:
            raise ValueError(
                f"{str(root)!r} has several splits: {', '.join(names)}; name one, as in "
                f"CocoDetection.in_folder({str(root)!r}, {names[0]!r})"
            )
        name = names[0] if split is None else split
        if name not in names:
            raise FileNotFoundError(f"{str(root)!r} has no split {name!r}; there is {', '.join(names)}")
        return cls(Path(root) / name, files[names.index(name)], keep_empty=keep_empty)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = range(len(self))[index]
        objects, rings, points = (
            slice(start[number], start[number + 1]) for start in (self._objects, self._rings, self._points)
        )
        # Copies: what a sample's owner changes must not change the data set.
        return {
            "path": self._path(number),
            "image_id": int(self.image_ids[number]),
            "declared": self._sizes[number].copy(),
            "boxes": self._box[objects].copy(),
            "labels": self._label[objects].copy(),
            "points": self._point[points].copy(),
            "rings": self._ring[rings].copy(),
        }

    def source(self, index: int) -> Source:
        """Returns the source of the picture, to be read ahead."""
        return Source(self._path(range(len(self))[index]))

    def _path(self, number: int) -> str:
        return str(self.images / str(self._names[number]))

    def _arrange(self, pictures: Pictures, objects: Objects, keep_empty: bool) -> None:
        """Sorts the objects by picture and lays all into arrays, with the offset at which each picture begins."""
        owner = np.array(objects.owner, np.int64)
        boxes = np.array(objects.boxes, np.float64).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        boxes = np.clip(boxes, 0, pictures.sizes[owner][:, [1, 0, 1, 0]]).astype(np.float32)
        sound = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
        order = np.flatnonzero(sound)
        order = order[np.argsort(owner[order], kind="stable")]
        counts = np.bincount(owner[order], minlength=len(pictures.ids))
        shown = np.arange(len(counts)) if keep_empty else np.flatnonzero(counts)
        if not len(shown):
            raise ValueError("no image has an object to detect; keep_empty=True keeps images without")
        self.left_out = {
            "crowds": objects.left_out["crowds"],
            "run-length masks": objects.left_out["run-length masks"],
            "degenerate objects": objects.left_out["degenerate objects"] + int((~sound).sum()),
            "images without objects": len(counts) - len(shown),
        }
        self.image_ids, self._names, self._sizes = (part[shown] for part in pictures)
        self._objects = _starts(counts[shown])
        self._box, self._label = boxes[order], np.array(objects.labels, np.int64)[order]
        self._lay_polygons([objects.polygons[number] for number in order])

    def _lay_polygons(self, polygons: Sequence[Sequence[list[float]]]) -> None:
        """Lays all polygons into arrays. ``polygons``: those of each object, in the order of ``_box``."""
        owner, lengths, points = array("q"), array("i"), array("f")
        for number, rings in enumerate(polygons):
            for ring in rings:
                owner.append(number)
                lengths.append(len(ring) // 2)
                points.extend(ring)
        owners, sizes = np.array(owner, np.int64), np.array(lengths, np.int32)
        self._rings = np.searchsorted(owners, self._objects)
        self._points = _starts(sizes)[self._rings]
        within = owners - np.repeat(self._objects[:-1], np.diff(self._rings))
        self._ring = np.stack([within.astype(np.int32), sizes], axis=1)
        self._point = np.array(points, np.float32).reshape(-1, 2)
        wrong = np.flatnonzero(~np.isfinite(self._point).all(axis=1))
        if len(wrong):
            image = self.image_ids[np.searchsorted(self._points, wrong[0], "right") - 1]
            raise ValueError(f"image {image} has an object with a polygon whose points are beyond float32")


def _starts(counts: Any) -> Any:
    """Returns where each of the parts with these lengths begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
