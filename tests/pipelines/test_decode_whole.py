"""A box cut from the kept picture is the box that is decoded alone: of every kind of file, by either decoder."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from pipelines import example_photographs
from pipelines.decoding import cut_box, decode_box, decode_whole
from pipelines.example_photographs import SUBSAMPLING, jpeg, photograph, with_orientation
from pipelines.headers import read_header

from .test_jpeg_scans import cut_before_scans

CAT = photograph("chelsea.png")[:251, :333]
Box = tuple[int, int, int, int]
pytestmark = pytest.mark.usefixtures("decoder")


def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def made() -> Iterator[tuple[str, bytes]]:
    """Files of every kind that the pipelines read."""
    picture = Image.fromarray(CAT[..., ::-1])
    transparent = Image.fromarray(np.dstack([CAT, CAT[..., :1]]))
    exif = Image.Exif()
    for orientation in range(1, 9):
        exif[0x0112] = orientation
        for number, progressive in enumerate((False, True)):
            part = CAT[: 243 + orientation, : 300 + 3 * orientation]
            encoded = jpeg(part, SUBSAMPLING[(orientation + number) % 3], progressive=progressive)
            yield f"jpeg {orientation} {progressive}", with_orientation(encoded, orientation)
        yield f"grey {orientation}", saved(picture.convert("L"), "JPEG", exif=exif)
        yield f"cmyk {orientation}", saved(picture.convert("CMYK"), "JPEG", exif=exif, progressive=orientation % 2 == 0)
        yield f"png {orientation}", saved(picture, "PNG", exif=exif)
        yield f"webp {orientation}", saved(picture, "WEBP", exif=exif, lossless=orientation % 2 == 0)
    for factor in (0x111111, 0x211111, 0x221111, 0x411111, 0x121111):
        options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factor, cv2.IMWRITE_JPEG_RST_INTERVAL, 5]
        yield f"factor {factor:x}", cv2.imencode(".jpg", CAT, options)[1].tobytes()
    deep = CAT.astype(np.uint16) * 251 + np.arange(333, dtype=np.uint16)[:, None]
    for channels in (1, 3, 4):
        yield f"16 bit {channels}", cv2.imencode(".png", np.dstack([deep, deep])[..., :channels])[1].tobytes()
    for mode in ("1", "L", "LA", "P"):
        yield f"png {mode}", saved(picture.convert(mode), "PNG")
    yield "palette with a transparent colour", saved(picture.quantize(16), "PNG", transparency=3)
    yield "png with a transparent colour", saved(picture, "PNG", transparency=(10, 20, 30))
    for kind in ("PNG", "WEBP"):
        yield f"transparent {kind}", saved(transparent, kind)
    yield "animation", saved(picture, "WEBP", save_all=True, append_images=[picture.rotate(90), picture])


def boxes(height: int, width: int, count: int, rng: np.random.Generator) -> Iterator[Box]:
    """The whole, and random ones: half of them narrow, half of them low."""
    yield 0, 0, height, width
    for _ in range(count):
        top, left = int(rng.integers(height)), int(rng.integers(width))
        high, wide = (4 if rng.random() < 0.5 else 1 << 30 for _ in range(2))
        yield (
            top,
            left,
            int(rng.integers(1, min(high, height - top) + 1)),
            int(rng.integers(1, min(wide, width - left) + 1)),
        )


def check(encoded: Any, count: int, rng: np.random.Generator, name: str = "") -> Any:
    """Cut boxes from what is kept of this file, and decode them; returns what is kept."""
    header = read_header(encoded.tobytes())
    encoded.flags.writeable = False
    whole = decode_whole(encoded)
    whole.flags.writeable = False
    for box in boxes(header.height, header.width, count, rng):
        found, expected = cut_box(whole, box), decode_box(encoded, box)
        assert found.dtype == expected.dtype == np.uint8 and found.shape == (*box[2:], 3)
        np.testing.assert_array_equal(found, expected, err_msg=f"{name} {box}")
    return whole


def test_of_every_kind_of_file() -> None:
    for number, (name, data) in enumerate(made()):
        whole = check(np.frombuffer(data, np.uint8), 2, np.random.default_rng(number), name)
        assert whole.ndim == 3, name


def test_of_the_examples(tmp_path: Path) -> None:
    example_photographs.write(tmp_path)
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        assert check(np.fromfile(path, np.uint8), 3, np.random.default_rng(1)).ndim == 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_single_row_or_column_at_any_edge(orientation: int) -> None:
    coffee = jpeg(photograph("coffee.png")[:399, :597], SUBSAMPLING[0], progressive=True)
    encoded = np.frombuffer(with_orientation(coffee, orientation), np.uint8)
    whole = decode_whole(encoded)
    height, width = whole.shape[:2]
    for at in range(76, min(height, width) - 3, 128):
        for side in ((at, 0, 3, 1), (at, width - 1, 3, 1), (0, at, 1, 3), (height - 1, at, 1, 3)):
            np.testing.assert_array_equal(decode_box(encoded, side), cut_box(whole, side), err_msg=str(side))


@pytest.mark.parametrize("orientation", [1, 6])
def test_of_a_file_that_lacks_scans_the_bytes_are_kept(orientation: int) -> None:
    """Boxes of it, decoded alone, are not those of the whole: what is missing is guessed."""
    for data in cut_before_scans(jpeg(CAT, SUBSAMPLING[2], progressive=True)):
        encoded = np.frombuffer(with_orientation(data, orientation), np.uint8)
        assert check(encoded, 10, np.random.default_rng(1)) is encoded


def test_of_a_damaged_file(decoder: str) -> None:
    """It is decoded, or not, as without."""
    rng = np.random.default_rng(3)
    seen = set()
    for kind, data in (("jpeg", jpeg(CAT)), ("progressive", jpeg(CAT, progressive=True)), ("png", saved_png())):
        for number in range(12):
            damaged = bytearray(data)
            at = int(len(data) * rng.uniform(0.3, 0.95))
            if number % 2:
                damaged[at:-2] = bytes(len(data) - at - 2)
            else:
                damaged[at : at + 20] = rng.integers(0, 256, 20, np.uint8).tobytes()
            encoded = np.frombuffer(bytes(damaged), np.uint8)
            whole = decode_whole(encoded)
            for box in boxes(len(CAT), len(CAT[0]), 5, rng):
                found, expected = tried(cut_box, whole, box), tried(decode_box, encoded, box)
                np.testing.assert_array_equal(found, expected)
            seen.add((kind, whole.ndim))
    assert seen >= {("jpeg", 3), ("progressive", 1), ("png", 1)}


def saved_png() -> bytes:
    return saved(Image.fromarray(CAT), "PNG")


def tried(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except ValueError as error:
        return str(error)


def test_a_box_beyond_the_picture() -> None:
    whole = decode_whole(np.frombuffer(jpeg(CAT), np.uint8))
    with pytest.raises(ValueError, match="is 333 x 251, unlike its header"):
        cut_box(whole, (200, 0, 52, 10))
