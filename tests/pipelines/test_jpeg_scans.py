"""Which progressive JPEG files lack scans."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from PIL import Image

from pipelines.example_photographs import SUBSAMPLING, jpeg, photograph
from pipelines.jpeg_scans import has_all_scans


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


def test_other_files_have_one_for_all() -> None:
    assert has_all_scans(jpeg(photograph("chelsea.png")))
    assert has_all_scans(cmyk())


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
