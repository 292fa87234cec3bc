"""Headers of JPEG and PNG files: sizes and orientations, and nothing but ValueError for anything else."""

from __future__ import annotations

import cv2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import example_photographs
from pipelines.headers import Header, read_header

CAT = example_photographs.photograph("chelsea.png")
JPEG = example_photographs.jpeg(CAT)
PNG = cv2.imencode(".png", CAT[:40, :30])[1].tobytes()


def test_jpeg() -> None:
    assert read_header(JPEG) == Header(300, 451)
    assert read_header(example_photographs.jpeg(CAT, progressive=True)) == Header(300, 451, progressive=True)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation: int) -> None:
    height, width = (451, 300) if orientation >= 5 else (300, 451)
    found = read_header(example_photographs.with_orientation(JPEG, orientation))
    assert found == Header(height, width, orientation)


@pytest.mark.parametrize("orientation", [0, 9, 700])
def test_an_orientation_that_does_not_exist_means_upright(orientation: int) -> None:
    assert read_header(example_photographs.with_orientation(JPEG, orientation)).orientation == 1


def test_png() -> None:
    assert read_header(PNG) == Header(40, 30)


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
    damaged = bytearray(example_photographs.with_orientation(JPEG, 6)[:length])
    if at < len(damaged):
        damaged[at] = value
    _header_or_value_error(bytes(damaged))
    _header_or_value_error(PNG[:8] + bytes(damaged))


def _header_or_value_error(data: bytes) -> None:
    try:
        header = read_header(data)
    except ValueError:
        return
    assert header.height >= 1
    assert header.width >= 1
