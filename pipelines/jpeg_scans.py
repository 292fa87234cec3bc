"""Finds whether a JPEG file has all of its picture's scans.

ITU-T T.81, annexes B.2.3 (scan header) and G.1.1 (progression). Of a progressive one that lacks some, libjpeg-turbo
guesses what they would bring from the blocks around ("block smoothing"), and where it decodes a region, other blocks
lie around it: its pixels are not those of the whole picture.
"""

from __future__ import annotations

import re

_MARKER = re.compile(rb"\xff[\x02-\xcf\xd9-\xfe]")  # but for stuffed, filling and restart bytes, and the start of image
_END, _SCAN = 0xD9, 0xDA
_COEFFICIENTS = 64  # of a block, in zigzag order


def has_all_scans(data: bytes) -> bool:
    """Returns whether every coefficient of the progressive JPEG ``data`` comes to its last bit.

    True for other JPEG files, False where its header is broken.
    """
    missing: dict[int, list[int]] = {}  # bits, by component and coefficient
    at = 2
    try:
        while (found := _MARKER.search(data, at)) is not None and data[found.end() - 1] != _END:
            marker, body = data[found.end() - 1], found.end() + 2
            if marker == _SCAN:
                _scan(data, body, missing)
            elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # frame header
                if marker & 3 != 2:
                    return True
                missing = {data[body + 6 + 3 * n]: [1] * _COEFFICIENTS for n in range(data[body + 5])}
            at = body - 2 + int.from_bytes(data[body - 2 : body], "big")
    except (IndexError, KeyError):  # a broken header
        return False
    return not any(map(any, missing.values()))


def _scan(data: bytes, body: int, missing: dict[int, list[int]]) -> None:
    """Takes the bits that this scan brings off what is missing."""
    count = data[body]
    first, last, bits = data[body + 1 + 2 * count : body + 4 + 2 * count].ljust(3, b"\xff")
    for component in data[body + 1 : body + 1 + 2 * count : 2]:
        for coefficient in range(first, last + 1):
            missing[component][coefficient] = bits & 0x0F
