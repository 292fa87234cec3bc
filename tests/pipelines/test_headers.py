"""Headers of JPEG, PNG and WebP files: sizes, orientations and scans, and nothing but ValueError for anything else."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipelines.example_photographs import SUBSAMPLING, jpeg, photograph, with_orientation
from pipelines.headers import read_header, repaired
from pipelines.jpeg_scans import has_all_scans
from tests.pipelines.odd_photographs import JPEG, LOSSY, PNG, WEBP, tiff, webp


@pytest.mark.parametrize("coded", [WEBP, LOSSY], ids=["lossless", "lossy"])
def test_exif_of_which_a_webp_says_nothing_is_not_read(coded: bytes) -> None:
    assert read_header(webp(tiff(6), coded=coded)).orientation == 6
    assert read_header(webp(tiff(6), coded=coded, flags=0)).orientation == 1


def test_a_webp_that_is_cut_off_is_refused() -> None:
    for length in (12, 20, len(WEBP) // 2, len(WEBP) - 1):
        with pytest.raises(ValueError, match="the WebP file is cut off"):
            read_header(WEBP[:length])
    with pytest.raises(ValueError, match="broken WebP header"):
        read_header(b"RIFF\4\0\0\0WEBP")


def test_a_decompression_bomb_is_an_error() -> None:
    """Sixty kilobytes that claim four thousand million pixels."""
    huge = (65_535).to_bytes(4, "big")
    with pytest.raises(ValueError, match=r"the header claims 65535 x 65535 pixels; 268435456 are the most"):
        read_header(PNG[:16] + huge + huge + PNG[24:])
    frame = JPEG.index(b"\xff\xc0")
    with pytest.raises(ValueError, match="are the most"):
        read_header(JPEG[: frame + 5] + b"\xff\xff\xff\xff" + JPEG[frame + 9 :])


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda tail: JPEG[:2] + tail)))
def test_any_bytes_give_a_header_or_a_value_error(data: bytes) -> None:
    _header_or_value_error(data)


@given(st.integers(0, 700), st.integers(0, 255), st.integers(1, len(JPEG)))
def test_a_damaged_file_gives_a_header_or_a_value_error(at: int, value: int, length: int) -> None:
    damaged = bytearray(with_orientation(JPEG, 6)[:length])
    if at < len(damaged):
        damaged[at] = value
    _header_or_value_error(bytes(damaged))
    _header_or_value_error(PNG[:8] + bytes(damaged))
    extended = bytearray(webp(tiff(6)))
    extended[at % len(extended)] = value
    _header_or_value_error(bytes(extended))


def _header_or_value_error(data: bytes) -> None:
    try:
        header = read_header(data)
    except ValueError:
        return
    assert header.height >= 1
    assert header.width >= 1
    again = read_header(repaired(data, header))
    assert (again.height, again.width, again.orientation, again.repairs) == (
        header.height,
        header.width,
        header.orientation,
        (),
    )


# --- progressive JPEG files that lack scans --------------------------------------------------------------------


def cut_before_scans(data: bytes) -> list[bytes]:
    """The file with its first scan, with its first two, and so on, without the last; each ends as it should."""
    starts = [found.start() for found in re.finditer(rb"\xff\xda", data)]
    return [data[:start] + b"\xff\xd9" for start in starts[1:]]


def cmyk(**options: bool) -> bytes:
    file = io.BytesIO()
    Image.fromarray(photograph("chelsea.png")).convert("CMYK").save(file, "JPEG", **options)
    return file.getvalue()


FILES = {
    "colour": jpeg(photograph("chelsea.png"), progressive=True),
    "all of one size": jpeg(photograph("chelsea.png"), SUBSAMPLING[2], progressive=True),
    "grey": jpeg(photograph("camera.png"), progressive=True),
    "cmyk": cmyk(progressive=True),
}


@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
def test_scans_that_are_missing(data: bytes) -> None:
    assert has_all_scans(data)
    assert has_all_scans(data + b"\xff\xda trailer")
    shorter = cut_before_scans(data)
    assert len(shorter) >= 5
    for file in shorter:
        assert not has_all_scans(file)
        assert not has_all_scans(file + data), "nothing is read beyond the end"


def test_broken_headers() -> None:
    data = FILES["colour"]
    first = data.index(b"\xff\xda")
    frame = data.index(b"\xff\xc2")
    for end in range(frame + 4, first + 9):
        assert not has_all_scans(data[:end]) or end < frame + 10
    assert not has_all_scans(data[: frame + 10] + b"\x77" + data[frame + 11 :]), "scans of an unknown component"
    rng = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(data[: int(rng.integers(2, len(data)))])
        damaged[int(rng.integers(len(damaged)))] = int(rng.integers(256))
        has_all_scans(bytes(damaged))
