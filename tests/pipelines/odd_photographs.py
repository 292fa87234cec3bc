"""Photographs that are odd but sound, as phones, webcams and converters write them, by what is odd about them."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageOps

from pipelines import example_photographs

PICTURE = example_photographs.photograph("chelsea.png")[100:140, 100:160]
JPEG = example_photographs.jpeg(PICTURE)
PNG = cv2.imencode(".png", PICTURE)[1].tobytes()
WEBP, LOSSY = (cv2.imencode(".webp", PICTURE, [cv2.IMWRITE_WEBP_QUALITY, n])[1].tobytes() for n in (101, 90))
_FORMS = {1: "B", 3: "H", 4: "I", 6: "b", 7: "B", 8: "h", 9: "i"}


def tiff(orientation: int, kind: int = 3, order: str = "<", count: int = 1) -> bytes:
    """A TIFF structure that says the orientation by ``count`` numbers of this kind, the first of which it is."""
    value = struct.pack(order + _FORMS[kind] * count, orientation, *[0] * (count - 1))
    entry = value.ljust(4, b"\0") if len(value) <= 4 else struct.pack(order + "I", 26)
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IHHHI", 8, 1, 0x0112, kind, count)
    return start + entry + bytes(4) + (value if len(value) > 4 else b"")


def jpeg(*structures: bytes) -> bytes:
    segments = (b"\xff\xe1" + struct.pack(">H", len(each) + 8) + b"Exif\0\0" + each for each in structures)
    return JPEG[:2] + b"".join(segments) + JPEG[2:]


def png(*structures: bytes) -> bytes:
    chunks = (struct.pack(">I", len(each)) + b"eXIf" + each + _checksum(b"eXIf" + each) for each in structures)
    return PNG[:33] + b"".join(chunks) + PNG[33:]


def webp(*structures: bytes, coded: bytes = WEBP, flags: int = 8) -> bytes:
    """The extended format: of its ``flags`` the bit 8 says that there is Exif."""
    extended = struct.pack("<4sIB3x", b"VP8X", 10, flags) + bytes([59, 0, 0, 39, 0, 0])
    chunks = (struct.pack("<4sI", b"EXIF", len(each)) + each + bytes(len(each) % 2) for each in structures)
    body = b"WEBP" + extended + coded[12:] + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_behind(length: int) -> bytes:
    """Exif behind another chunk of so many bytes, and one to fill it up where that is odd."""
    whole = webp(tiff(6))
    at = whole.index(b"EXIF")
    chunk = struct.pack("<4sI", b"xtra", length) + bytes(length + length % 2)
    body = whole[8:at] + chunk + whole[at:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


def with_bytes_before(marker: int, extra: bytes, encoded: bytes = JPEG) -> bytes:
    at = encoded.index(bytes([0xFF, marker]))
    return encoded[:at] + extra + encoded[at:]


def _checksum(chunk: bytes) -> bytes:
    return zlib.crc32(chunk).to_bytes(4, "big")


ODD: dict[str, bytes] = {
    **{
        f"{make.__name__}, orientation of kind {kind}, {order}": make(tiff(6, kind, order))
        for make in (jpeg, png, webp)
        for kind in _FORMS
        for order in "<>"
    },
    **{
        f"{make.__name__}, {what}": make(*structures)
        for make in (jpeg, png, webp)
        for what, structures in {
            "6 and 1": (tiff(6), tiff(1)),
            "1 and 6": (tiff(1), tiff(6)),
            "6 as LONG and 1": (tiff(6, 4, ">"), tiff(1)),
            "1 and 6 as LONG": (tiff(1), tiff(6, 4, ">")),
            "three numbers": (tiff(6, 3, ">", 3),),
            "none that there is": (tiff(77, 4),),
        }.items()
    },
    "jpeg, a broken structure and 6": jpeg(b"XX", tiff(6)),
    **{f"webp, {n}": webp(tiff(n)) for n in range(1, 9)},
    **{f"webp, {n}, lossy": webp(tiff(n), coded=LOSSY) for n in (1, 8)},
    "webp, Exif's mark before the structure": webp(b"Exif\0\0" + tiff(6)),
    "webp, Exif behind an odd chunk": webp_behind(5),
    "webp, Exif behind an even chunk": webp_behind(6),
    "webp, Exif's mark before LONG": webp(b"Exif\0\0" + tiff(6, 4, ">")),
    **{
        f"jpeg, {extra!r} before {marker:x}": with_bytes_before(marker, extra)
        for marker in (0xDB, 0xC0, 0xC4, 0xDA)
        for extra in (b"\0\0", b"\xff\0", b"\x12\x34\x56", b"\xff\xff\xff", b"\xff\xd0", b"\x12\xff\xff")
    },
    "jpeg, bytes before an orientation as LONG": with_bytes_before(0xE0, b"\0\1", jpeg(tiff(6, 4, ">"))),
}
"""Files by what is odd about them."""


def as_pillow_reads(encoded: bytes) -> Any:
    """The upright picture: uint8 (h, w, 3)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of entries with several numbers
        return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB"))
