"""Reads what a JPEG, PNG or WebP file says about its picture, without decoding it.

The formats: JPEG, ITU-T T.81 annex B; PNG, W3C Recommendation (third edition) section 11; WebP, RFC 9649 section 2, and
RFC 6386 section 9.1 for the lossy frame in it; orientation, Exif 2.3 section 4.6 (a TIFF structure, in JPEG's APP1
segment, PNG's eXIf chunk or WebP's EXIF chunk).

Decision: other formats are refused here, because the two lanes' decoders do not both know them, and a sample must
not depend on its lane. For the same reason a JPEG without its end marker is refused: a decoder of the whole
picture fails on it, one that decodes a region may never get there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

MOST_PIXELS = 1 << 28
"""A picture that claims more is refused before a decoder reserves memory for it: 268 million, 16 thousand squared."""

_PNG = b"\x89PNG\r\n\x1a\n"
_ORIENTATION = 0x0112


@dataclass(frozen=True, slots=True)
class Header:
    """``height`` and ``width``: pixels of the upright picture, its orientation applied. ``orientation``: Exif's 1 to 8.
    ``progressive``: whether it is slow to decode, and only as a whole: a JPEG coded in several scans, or a lossy WebP.
    """

    height: int
    width: int
    orientation: int = 1
    progressive: bool = False


def read_header(data: bytes) -> Header:
    """The header of the encoded picture ``data``.

    Raises ValueError for anything but a whole JPEG or WebP or a PNG, and for more than ``MOST_PIXELS``.
    """
    if not data:
        raise ValueError("the file is empty")
    if data[:2] == b"\xff\xd8":
        coded = _jpeg(data)
    elif data[:8] == _PNG:
        coded = _png(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        coded = _webp(data)
    else:
        raise ValueError(f"neither a JPEG nor a PNG nor a WebP file; it begins with {data[:12]!r}")
    found = replace(coded, height=coded.width, width=coded.height) if coded.orientation >= 5 else coded
    if found.height < 1 or found.width < 1:
        raise ValueError(f"the header gives a picture of {found.width} x {found.height} pixels")
    if found.height * found.width > MOST_PIXELS:
        raise ValueError(f"the header claims {found.width} x {found.height} pixels; {MOST_PIXELS} are the most")
    return found


def _jpeg(data: bytes) -> Header:
    """As all of these: with the size that is coded, before the orientation is applied."""
    at, size, orientation, progressive = 2, None, 1, False
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            raise ValueError(f"broken JPEG header: no marker at byte {at}")
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        body = at + 4
        if marker == 0xDA:  # start of scan: the header ends here
            if size is None:
                raise ValueError("broken JPEG header: no frame header before the first scan")
            if data.rfind(b"\xff\xd9", at) < 0:
                raise ValueError("the JPEG file is cut off: it has no end marker")
            return Header(size[0], size[1], orientation, progressive)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # frame header
            size = struct.unpack(">HH", data[body + 1 : body + 5]) if len(data) >= body + 5 else None
            progressive = marker & 3 == 2
        elif marker == 0xE1 and data[body : body + 6] == b"Exif\0\0":
            orientation = _orientation(data[body + 6 : at + 2 + length])
        at += 2 + length
    raise ValueError("broken JPEG header: the file ends before its first scan")


def _png(data: bytes) -> Header:
    if len(data) < 33 or data[12:16] != b"IHDR":
        raise ValueError("broken PNG header")
    width, height = struct.unpack(">II", data[16:24])
    at, orientation = 33, 1
    while at + 8 <= len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind == b"eXIf":
            orientation = _orientation(data[at + 8 : at + 8 + length])
        elif kind == b"IEND":
            break
        at += 12 + length
    return Header(height, width, orientation)


def _webp(data: bytes) -> Header:
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise ValueError(f"the WebP file is cut off: it has {len(data)} bytes of {end}")
    at, size, orientation, lossy = 12, None, 1, True
    tells = data[12:16] == b"VP8X" and data[20:21] and data[20] & 0x08  # else decoders do not look for an EXIF chunk
    while at + 8 <= end:
        kind, length = struct.unpack("<4sI", data[at : at + 8])
        body = data[at + 8 : min(at + 8 + length, end)]
        if at == 12:
            size = _webp_size(kind, body)
        lossy = lossy and kind != b"VP8L"
        if kind == b"EXIF" and tells:
            orientation = _orientation(body)
        at += 8 + length + length % 2
    if size is None:
        raise ValueError("broken WebP header: it does not begin with a picture")
    return Header(*size, orientation, lossy)


def _webp_size(kind: bytes, body: bytes) -> tuple[int, int] | None:
    """Height and width by the first chunk: of the canvas, which a picture fills, or of the only picture."""
    if kind == b"VP8X" and len(body) >= 10:
        return 1 + int.from_bytes(body[7:10], "little"), 1 + int.from_bytes(body[4:7], "little")
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a" and len(body) >= 10:
        width, height = struct.unpack("<HH", body[6:10])
        return height & 0x3FFF, width & 0x3FFF
    if kind == b"VP8L" and body[:1] == b"\x2f" and len(body) >= 5:
        (bits,) = struct.unpack("<I", body[1:5])
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    return None


def _orientation(tiff: bytes) -> int:
    """The orientation of a TIFF structure; 1 (upright) where it is absent or broken, as decoders do."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None or len(tiff) < 8:
        return 1
    (at,) = struct.unpack(order + "I", tiff[4:8])
    if at + 2 > len(tiff):
        return 1
    (count,) = struct.unpack(order + "H", tiff[at : at + 2])
    for entry in range(at + 2, min(at + 2 + 12 * count, len(tiff) - 11), 12):
        tag, kind, _, value = struct.unpack(order + "HHIH", tiff[entry : entry + 10])
        if tag == _ORIENTATION and kind == 3:
            return value if 1 <= value <= 8 else 1
    return 1
