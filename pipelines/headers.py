"""Reads what a JPEG, PNG or WebP file says about its picture, without decoding it.

The formats: JPEG, ITU-T T.81 annex B; PNG, W3C Recommendation (third edition) section 11; WebP, RFC 9649 section 2, and
RFC 6386 section 9.1 for the lossy frame in it; orientation, Exif 2.3 section 4.6 (a TIFF structure, in JPEG's APP1
segment, PNG's eXIf chunk or WebP's EXIF chunk).

Decision: other formats are refused here, because the two lanes' decoders do not both know them, and a sample must
not depend on its lane. For the same reason a JPEG without its end marker is refused: a decoder of the whole
picture fails on it, one that decodes a region may never get there. And where decoders do not read alike what is odd
but sound (bytes between a JPEG's segments, orientations that are no SHORT, several Exif segments), they get other bytes
for it (``repaired``), which all of them read as Pillow reads the file.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass, replace

MOST_PIXELS = 1 << 28
"""A picture that claims more is refused before a decoder reserves memory for it: 268 million, 16 thousand squared."""

_PNG = b"\x89PNG\r\n\x1a\n"
_EXIF = b"Exif\0\0"
_ORIENTATION = 0x0112
_SHORT = 3
_KINDS = {_SHORT: "H", 4: "I", 6: "b", 8: "h", 9: "i"}  # of whole numbers in a TIFF structure, as Pillow takes them
_MARKER = re.compile(rb"\xff+[\x02-\xcf\xd8-\xfe]")  # of a segment
_NO_SEGMENT = frozenset((0x00, 0x01, *range(0xD0, 0xD8), 0xFF))  # stuffed, alone, restart and filling bytes

Repair = tuple[int, int, bytes]
"""Where bytes of a file begin and end, and what is to stand in their place."""


@dataclass(frozen=True, slots=True)
class Header:
    """``height`` and ``width``: pixels of the upright picture, its orientation applied. ``orientation``: Exif's 1 to 8.
    ``progressive``: whether it is slow to decode, and only as a whole: a JPEG coded in several scans, or a lossy WebP.
    ``repairs``: of what decoders do not read alike, in the order of the file.
    """

    height: int
    width: int
    orientation: int = 1
    progressive: bool = False
    repairs: tuple[Repair, ...] = ()


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


def repaired(data: bytes, header: Header) -> bytes:
    """Returns the file ``data``, whose header this is, with its repairs made, so that all decoders read it alike."""
    parts, at = [], 0
    for begin, end, instead in header.repairs:
        parts += [data[at:begin], instead]
        at = end
    return b"".join((*parts, data[at:]))


def _jpeg(data: bytes) -> Header:
    """Returns a JPEG's header with the size as coded, before the orientation is applied (``_png``, ``_webp`` too)."""
    at, size, orientation, progressive = 2, None, 0, False
    repairs: list[Repair] = []
    while at + 4 <= len(data):
        marker = data[at + 1]
        if data[at] != 0xFF or marker in _NO_SEGMENT:
            at = _next_marker(data, at, repairs)
            continue
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        body = at + 4
        if marker == 0xDA:  # start of scan: the header ends here
            if size is None:
                raise ValueError("broken JPEG header: no frame header before the first scan")
            if data.rfind(b"\xff\xd9", at) < 0:
                raise ValueError("the JPEG file is cut off: it has no end marker")
            return Header(size[0], size[1], orientation or 1, progressive, tuple(repairs))
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # frame header
            size = struct.unpack(">HH", data[body + 1 : body + 5]) if len(data) >= body + 5 else None
            progressive = marker & 3 == 2
        elif marker == 0xE1 and data[body : body + 6] == _EXIF:
            if orientation:  # the first one counts
                repairs.append((at, at + 2 + length, b""))
            else:
                orientation, more = _orientation(data[body + 6 : at + 2 + length], body + 6)
                repairs += more
        at += 2 + length
    raise ValueError("broken JPEG header: the file ends before its first scan")


def _next_marker(data: bytes, at: int, repairs: list[Repair]) -> int:
    """Returns where the next marker is, from ``at`` on; ``len(data)`` if there is none. Bytes before it that neither
    belong to a segment nor fill a gap are to be left out (``repairs``): libjpeg skips them."""
    found = _MARKER.search(data, at)
    if found is None:
        return len(data)
    if found.start() > at:
        repairs.append((at, found.start(), b""))
    return found.end() - 2


def _png(data: bytes) -> Header:
    if len(data) < 33 or data[12:16] != b"IHDR":
        raise ValueError("broken PNG header")
    width, height = struct.unpack(">II", data[16:24])
    at, orientation = 33, 1
    before, last, repairs = list[Repair](), None, list[Repair]()  # of several eXIf chunks the last one counts
    while at + 8 <= len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        end = at + 12 + length
        if kind == b"eXIf":
            before += [] if last is None else [last]
            last = at, end, b""
            orientation, repairs = _orientation(data[at + 8 : end - 4], at + 8)
            if repairs:
                whole = repaired(data[: end - 4], Header(0, 0, repairs=tuple(repairs)))[at + 4 :]
                repairs = [(at + 4, end, whole + zlib.crc32(whole).to_bytes(4, "big"))]
        elif kind == b"IEND":
            break
        at = end
    return Header(height, width, orientation, repairs=(*before, *repairs))


def _webp(data: bytes) -> Header:
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise ValueError(f"the WebP file is cut off: it has {len(data)} bytes of {end}")
    at, size, orientation, lossy = 12, None, 0, True
    repairs: list[Repair] = []
    tells = data[12:16] == b"VP8X" and data[20:21] and data[20] & 0x08  # else decoders do not look for an EXIF chunk
    while at + 8 <= end:
        kind, length = struct.unpack("<4sI", data[at : at + 8])
        body = data[at + 8 : min(at + 8 + length, end)]
        if at == 12:
            size = _webp_size(kind, body)
        lossy = lossy and kind != b"VP8L"
        if kind == b"EXIF" and tells and orientation:  # the first one counts
            repairs.append((at, at + 4, b"none"))
        elif kind == b"EXIF" and tells:
            more = (
                len(_EXIF) if body.startswith(_EXIF) else 0
            )  # ImageMagick leaves it there, which decoders do not skip
            if more:
                repairs.append((4, 8, struct.pack("<I", end - 8 - more)))
                repairs.append((at + 4, at + 8 + more, struct.pack("<I", length - more)))
            orientation, others = _orientation(body[more:], at + 8 + more)
            repairs += others
        elif length % 2 and tells:  # nvImageCodec does not skip the byte that fills it up, and finds no EXIF chunk
            repairs.append((at + 4, at + 8, struct.pack("<I", length + 1)))
        at += 8 + length + length % 2
    if size is None:
        raise ValueError("broken WebP header: it does not begin with a picture")
    return Header(*size, orientation or 1, lossy, tuple(sorted(repairs)))


def _webp_size(kind: bytes, body: bytes) -> tuple[int, int] | None:
    """Returns height and width by the first chunk: of the canvas, which a picture fills, or of the only picture; None
    where it says neither."""
    if kind == b"VP8X" and len(body) >= 10:
        return 1 + int.from_bytes(body[7:10], "little"), 1 + int.from_bytes(body[4:7], "little")
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a" and len(body) >= 10:
        width, height = struct.unpack("<HH", body[6:10])
        return height & 0x3FFF, width & 0x3FFF
    if kind == b"VP8L" and body[:1] == b"\x2f" and len(body) >= 5:
        (bits,) = struct.unpack("<I", body[1:5])
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    return None


def _orientation(tiff: bytes, at: int) -> tuple[int, list[Repair]]:
    """Returns the orientation of a TIFF structure, 1 (upright) where it is absent or broken, as decoders do; and the
    repair that makes its entry a SHORT, where it is none. ``at``: where the structure begins in the file."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None or len(tiff) < 8:
        return 1, []
    (begin,) = struct.unpack(order + "I", tiff[4:8])
    if begin + 2 > len(tiff):
        return 1, []
    (entries,) = struct.unpack(order + "H", tiff[begin : begin + 2])
    for entry in range(begin + 2, min(begin + 2 + 12 * entries, len(tiff) - 11), 12):
        tag, kind, count, value = struct.unpack(order + "HHIH", tiff[entry : entry + 10])
        if tag == _ORIENTATION:
            if kind == _SHORT and count == 1:
                return (value if 1 <= value <= 8 else 1), []
            value = _number(tiff, entry, order)
            return value, [(at + entry, at + entry + 12, struct.pack(order + "HHIHH", tag, _SHORT, 1, value, 0))]
    return 1, []


def _number(tiff: bytes, entry: int, order: str) -> int:
    """The orientation in an entry of any kind; 1 (upright) where it has none."""
    kind, count, place = struct.unpack(order + "HII", tiff[entry + 2 : entry + 12])
    form = order + _KINDS.get(kind, "x")
    size = struct.calcsize(form)
    begin = entry + 8 if size * count <= 4 else place
    values = struct.unpack(form, tiff[begin : begin + size]) if begin + size <= len(tiff) else ()
    return values[0] if count and values and 1 <= values[0] <= 8 else 1
