"""Reads COCO's annotation document (``instances_*.json``) and says what is wrong with it.

The format is described in ``pipelines.coco``. Every ValueError names the image, category or annotation at fault.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from pathlib import Path
from reprlib import repr as brief
from typing import Any, NamedTuple

import numpy as np

BACKGROUND = "background"  # label 0
NO_CATEGORY = -1  # its id

_LARGEST_ID = 2**63 - 1
_LARGEST_SIDE = 2**31 - 1  # of a picture, in an int32
_CORNERS = 3  # that a polygon needs to enclose anything
_KINDS = {int: "a whole number", str: "a text", list: "a list"}


class Pictures(NamedTuple):
    """Ids in rising order, file names, and sizes (height, width)."""

    ids: Any
    names: Any
    sizes: Any


class Objects(NamedTuple):
    """In the document's order: the number of each object's picture, its label, its box as it is given, its polygons.
    ``left_out``: how many "crowds", "degenerate objects" whose polygons enclose nothing, and "run-length masks" of
    objects that are no crowds, and are there by their boxes alone."""

    owner: array[int]
    labels: array[int]
    boxes: array[float]
    polygons: list[list[list[float]]]
    left_out: Counter[str]


def read(path: Path) -> tuple[Pictures, list[int], list[str], Objects]:
    """Returns the pictures, the categories' ids as COCO has them and their names, both by label, and the objects of the
    document in the file ``path``. Raises ValueError for one that is not what it should be."""
    document = _document(path)
    pictures = _pictures(_entries(document, "images"))
    category_ids, classes = _categories(_entries(document, "categories"))
    return pictures, category_ids, classes, _objects(_entries(document, "annotations"), pictures.ids, category_ids)


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"it must hold an object with images, annotations and categories, not {brief(document)}")
    return document


def _entries(document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = document.get(key)
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        what = "has no" if key not in document else "has no list of objects under"
        raise ValueError(f"it {what} {key!r}; COCO's detection annotations are in the files instances_*.json")
    return found


def _pictures(entries: list[dict[str, Any]]) -> Pictures:
    if not entries:
        raise ValueError("it lists no images")
    numbers = [_value(entry, "id", int, "image") for entry in entries]
    for entry, number in zip(entries, numbers, strict=True):
        if abs(number) > _LARGEST_ID:
            raise _wrong(entry, "image", "has an 'id' that an int64 does not hold: number the images anew")
    ids = np.array(numbers, np.int64)
    sizes = [[_value(entry, side, int, "image") for side in ("height", "width")] for entry in entries]
    for entry, size in zip(entries, sizes, strict=True):
        if min(size) < 1 or max(size) > _LARGEST_SIDE:
            raise _wrong(entry, "image", f"is declared to be {size[1]} x {size[0]} pixels")
    names = np.array([_value(entry, "file_name", str, "image") for entry in entries])
    order = np.argsort(ids)
    twice = np.flatnonzero(np.diff(ids[order]) == 0)
    if len(twice):
        raise ValueError(f"two images have the id {ids[order][twice[0]]}")
    return Pictures(ids[order], names[order], np.array(sizes, np.int32)[order])


def _categories(entries: list[dict[str, Any]]) -> tuple[list[int], list[str]]:
    """Returns COCO's ids and the names, by label; the first ones are the background's."""
    names = {_value(entry, "id", int, "category"): _value(entry, "name", str, "category") for entry in entries}
    if len(names) != len(entries):
        raise ValueError("two categories have the same id")
    ids = sorted(names)
    return [NO_CATEGORY, *ids], [BACKGROUND, *(names[number] for number in ids)]


def _objects(entries: list[dict[str, Any]], images: Any, categories: list[int]) -> Objects:
    numbers = {number: place for place, number in enumerate(images.tolist())}
    labels = {number: label for label, number in enumerate(categories) if label}
    found = Objects(array("q"), array("q"), array("d"), [], Counter())
    for entry in entries:
        image, category = _value(entry, "image_id", int, "annotation"), _value(entry, "category_id", int, "annotation")
        if image not in numbers:
            raise _wrong(entry, "annotation", f"is of image {image}, which is not among the images")
        if category not in labels:
            raise _wrong(entry, "annotation", f"is of category {category}, which is not among the categories")
        crowd = _is_crowd(entry)
        polygons = None if crowd else _polygons(entry, found.left_out)
        if polygons is None:
            found.left_out["crowds" if crowd else "degenerate objects"] += 1
            continue
        found.owner.append(numbers[image])
        found.labels.append(labels[category])
        found.boxes.extend(_box(entry))
        found.polygons.append(polygons)
    return found


def _box(entry: dict[str, Any]) -> list[float]:
    box: list[float] = _value(entry, "bbox", list, "annotation")
    if len(box) != 4 or not _finite(box):
        raise _wrong(entry, "annotation", f"has a 'bbox' that is not left, top, width, height: {brief(box)}")
    return box


def _is_crowd(entry: dict[str, Any]) -> bool:
    """Returns whether an annotation is of a crowd. Converters also write "0" and "1"."""
    value = entry.get("iscrowd")
    if value not in (None, 0, 1, "0", "1"):
        raise _wrong(entry, "annotation", f"has {brief(value)} as 'iscrowd', not 0 or 1")
    return value in (1, "1")


def _polygons(entry: dict[str, Any], left_out: Counter[str]) -> list[list[float]] | None:
    """Returns an object's polygons that enclose something; an empty list for one that is given by its box alone, or by
    a run-length mask, which counts as ``left_out``; None where all are flat."""
    found = entry.get("segmentation") or []
    if isinstance(found, dict):
        left_out["run-length masks"] += 1
        return []
    if not isinstance(found, list) or not all(
        isinstance(ring, list) and len(ring) % 2 == 0 and _finite(ring) for ring in found
    ):
        what = "has a 'segmentation' that is not a list of polygons, each x, y, x, y, ..."
        raise _wrong(entry, "annotation", f"{what}: {brief(found)}")
    rings = [ring for ring in found if len(ring) >= 2 * _CORNERS]
    return None if found and not rings else rings


def _finite(values: list[Any]) -> bool:
    try:
        return math.isfinite(sum(values))
    except (TypeError, OverflowError):
        return False


def _value(entry: dict[str, Any], key: str, kind: type, what: str) -> Any:
    value = entry.get(key)
    if type(value) is not kind:
        problem = f"has {brief(value)} as {key!r}, not {_KINDS[kind]}" if key in entry else f"has no {key!r}"
        raise _wrong(entry, what, problem)
    return value


def _wrong(entry: dict[str, Any], what: str, problem: str) -> ValueError:
    name = f"{what} {brief(entry['id'])}" if "id" in entry else f"the {what} {brief(entry)}"
    return ValueError(f"{name} {problem}")
