"""Writes a small data set of real photographs, for checks and tests: awkward on purpose.

The photographs lie inside the scikit-image package, so nothing is downloaded. Among the files are odd sizes, very
small pictures, greyscale, every chroma subsampling, progressive coding, PNG, WebP, and all eight Exif orientations.
"""

from __future__ import annotations

import io
import struct
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from minato_gpu.util.messages import from_extra

with from_extra("pipelines"):
    import cv2

COLOUR = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg", "retina.jpg")
GREY = ("camera.png", "moon.png", "coins.png")
SUBSAMPLING = (
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
)


def write(directory: str | Path) -> None:
    """Writes the files as ``directory``/class/name.jpg (.png, .webp). Existing files of those names are replaced."""
    directory = Path(directory)
    for number, name in enumerate((*COLOUR, *GREY)):
        folder = directory / Path(name).stem
        folder.mkdir(parents=True, exist_ok=True)
        picture = photograph(name)
        height, width = picture.shape[:2]
        (folder / "whole.jpg").write_bytes(jpeg(picture, SUBSAMPLING[number % 3]))
        odd = picture[: height - 1 - height % 2, : width - 3 - width % 2]
        (folder / "odd.jpg").write_bytes(jpeg(odd, SUBSAMPLING[(number + 1) % 3], progressive=number % 2 == 0))
        (folder / "turned.jpg").write_bytes(with_orientation(jpeg(odd, SUBSAMPLING[number % 3]), 1 + number % 8))
    _write_oddities(directory)


def _write_oddities(directory: Path) -> None:
    cat = photograph("chelsea.png")
    folder = directory / "chelsea"
    small = {"dot": (1, 1), "sliver": (3, 97), "post": (181, 2), "tiny": (13, 17)}
    for name, (height, width) in small.items():
        (folder / f"{name}.jpg").write_bytes(jpeg(cat[100 : 100 + height, 100 : 100 + width], SUBSAMPLING[0]))
    # Enlarged, so that the box is shrunk by more than two, where antialiasing would show.
    large = cv2.resize(cat, None, fx=3.3, fy=3.3, interpolation=cv2.INTER_CUBIC)
    (folder / "large.jpg").write_bytes(jpeg(large, SUBSAMPLING[0]))
    (folder / "lossless.png").write_bytes(_encoded(".png", cat[:251, :333]))
    for name, quality in {"lossy": 90, "lossless": 101}.items():
        (folder / f"{name}.webp").write_bytes(_encoded(".webp", cat[:251, :333], [cv2.IMWRITE_WEBP_QUALITY, quality]))


def photograph(name: str) -> Any:
    """A photograph of the scikit-image package by file name, as OpenCV holds it (blue first; grey has no channels).

    Read from the package itself: its own functions may go to the network for a file that they lack. By Pillow, which
    warns of no odd profile.
    """
    with from_extra("demo"):
        from PIL import Image

        data = (resources.files("skimage") / "data" / name).read_bytes()
    with Image.open(io.BytesIO(data)) as picture:
        if picture.mode == "L":
            return np.array(picture)
        return np.ascontiguousarray(np.asarray(picture.convert("RGB"))[:, :, ::-1])


def jpeg(picture: Any, subsampling: int = SUBSAMPLING[0], *, progressive: bool = False) -> bytes:
    """``picture`` as a JPEG file of quality 90."""
    options = [cv2.IMWRITE_JPEG_QUALITY, 90, cv2.IMWRITE_JPEG_PROGRESSIVE, int(progressive)]
    return _encoded(".jpg", picture, [*options, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, subsampling])


def with_orientation(encoded: bytes, orientation: int) -> bytes:
    """The JPEG file with an Exif segment that says how to turn it (1 to 8)."""
    tiff = b"MM\0\x2a" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    body = b"Exif\0\0" + tiff
    return encoded[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + encoded[2:]


def _encoded(suffix: str, picture: Any, options: list[int] | None = None) -> bytes:
    done, data = cv2.imencode(suffix, picture, options or [])
    if not done:
        raise ValueError(f"OpenCV cannot encode a picture as {suffix}")
    return data.tobytes()
