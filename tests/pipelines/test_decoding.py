"""The box that is decoded is the box of the whole decoded picture, with either decoder."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from pipelines import decoding, example_photographs, image_classification
from pipelines.example_photographs import SUBSAMPLING, photograph, with_orientation
from pipelines.headers import read_header
from tests.pipelines.odd_photographs import JPEG, ODD, as_pillow_reads
from tests.pipelines.test_headers import cut_before_scans
from tests.support import programs


@pytest.fixture(params=["nvimagecodec", "opencv"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Photographs are decoded by this library."""
    if request.param == "opencv":
        monkeypatch.setattr(decoding, "library", lambda: None)
    else:
        pytest.importorskip("nvidia.nvimgcodec")
    return str(request.param)


def whole_picture(encoded: Any) -> Any:
    return cv2.imdecode(encoded, cv2.IMREAD_COLOR_RGB)


ENCODED = np.frombuffer(JPEG, np.uint8)  # 40 x 60 pixels


def test_the_same_pixels_as_the_whole_picture(decoder: str, photographs: Path) -> None:
    """Odd sizes, greyscale, every orientation, JPEG and PNG; boxes at every edge."""
    rng = np.random.default_rng(1)
    for path in sorted(path for path in photographs.rglob("*") if path.is_file()):
        encoded = np.fromfile(path, np.uint8)
        whole = whole_picture(encoded)
        header = read_header(encoded.tobytes())
        assert whole.shape == (header.height, header.width, 3)
        for draw in range(4):
            top, bottom = sorted(int(n) for n in rng.choice(header.height + 1, 2, replace=False))
            left, right = sorted(int(n) for n in rng.choice(header.width + 1, 2, replace=False))
            if draw == 0:
                top, left, bottom, right = 0, 0, header.height, header.width
            found = decoding.decode_box(encoded, (top, left, bottom - top, right - left))
            assert found.dtype == np.uint8
            np.testing.assert_array_equal(found, whole[top:bottom, left:right], err_msg=f"{path} {draw}")


@pytest.mark.parametrize("what", ODD)
def test_what_is_odd_is_read_as_pillow_reads_it(decoder: str, what: str) -> None:
    encoded, expected = np.frombuffer(ODD[what], np.uint8), as_pillow_reads(ODD[what])
    header = read_header(ODD[what])
    assert (header.height, header.width) == expected.shape[:2]
    found = decoding.decode_box(encoded, (0, 0, *expected.shape[:2]))
    assert np.abs(found.astype(int) - expected).max() <= 2
    whole = decoding.decode_whole(decoding.as_repaired(encoded, ODD[what], header))
    assert np.array_equal(decoding.cut_box(whole, (3, 2, 20, 30)), found[3:23, 2:32])


def test_what_cannot_be_decoded(decoder: str) -> None:
    with pytest.raises(ValueError, match="cannot decode this picture"):
        decoding.decode_box(ENCODED[:30], (0, 0, 1, 1))
    with pytest.raises(ValueError, match="cannot decode this picture"):
        decoding.decode_box(np.frombuffer(b"no picture at all", np.uint8), (0, 0, 1, 1))
    for box in ((0, 0, 70, 60), (0, 30, 40, 40), (30, 0, 31, 20)):
        with pytest.raises(ValueError, match="is 60 x 40, unlike its header"):
            decoding.decode_box(ENCODED, box)


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | None]]:
    """Which GPUs may be seen each time that nvImageCodec is imported, which is asked for anew."""
    seen: list[str | None] = []

    def imported(name: str) -> str:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return name

    monkeypatch.setattr(importlib, "import_module", imported)
    decoding.library.cache_clear()
    yield seen
    decoding.library.cache_clear()


@pytest.mark.parametrize("before", [None, "2,3"])
@pytest.mark.parametrize(
    ("worker", "met", "hidden"), [(True, False, True), (True, True, False), (False, False, False)], ids=str
)
def test_importing_takes_no_memory_of_a_gpu_in_workers(
    monkeypatch: pytest.MonkeyPatch,
    importing: list[str | None],
    before: str | None,
    worker: bool,
    met: bool,
    hidden: bool,
) -> None:
    """One that has met CUDA goes on seeing its GPU; the environment is what it was for everything else."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    monkeypatch.setattr(decoding, "get_worker_info", lambda: object() if worker else None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: met)
    assert decoding.library() is not None
    assert importing == ["" if hidden else before]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


def test_where_it_refuses_to_work_opencv_decodes(monkeypatch: pytest.MonkeyPatch, importing: list[str | None]) -> None:
    def refuse(name: str) -> None:
        raise RuntimeError("cannot re-initialise CUDA in a forked process")

    monkeypatch.setattr(importlib, "import_module", refuse)
    assert decoding.library() is None
    assert np.array_equal(decoding.decode_box(ENCODED, (1, 2, 20, 30)), whole_picture(ENCODED)[1:21, 2:32])


_BUILT = """
import sys, minato_gpu.pipeline.pipeline, pipelines.image_classification
bad = [name for name in sys.modules if name.split(".")[0] in ("nvidia", "cupy")]
assert not bad, f"importing pulls in {bad}"
import torch
from pipelines import image_classification, object_detection
image_classification.pipeline(), object_detection.pipeline()
assert "nvidia.nvimgcodec" not in sys.modules, "in the training process, on whatever GPU is its first"
torch.cuda.is_initialized = lambda: True
image_classification.pipeline()
from pipelines import decoding
assert decoding.library.cache_info().currsize == 1, "forked workers share it"
"""


def test_the_training_process_imports_it_where_that_takes_nothing() -> None:
    """And importing a pipeline brings no device library at all."""
    programs.run("tests.support.source", _BUILT)


# --- a box that is cut from the kept picture is the box that is decoded alone -----------------------------------

CAT = photograph("chelsea.png")[:251, :333]
Box = tuple[int, int, int, int]


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


def test_repeated_chroma_needs_nvimagecodec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="fancy_upsampling=False needs nvImageCodec"):
        image_classification.build(fancy_upsampling=False)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_single_row_or_column_at_any_edge(decoder: str, orientation: int) -> None:
    coffee = example_photographs.jpeg(photograph("coffee.png")[:399, :597], SUBSAMPLING[0], progressive=True)
    encoded = np.frombuffer(with_orientation(coffee, orientation), np.uint8)
    whole = decoding.decode_whole(encoded)
    height, width = whole.shape[:2]
    for at in range(76, min(height, width) - 3, 128):
        for side in ((at, 0, 3, 1), (at, width - 1, 3, 1), (0, at, 1, 3), (height - 1, at, 1, 3)):
            np.testing.assert_array_equal(
                decoding.decode_box(encoded, side), decoding.cut_box(whole, side), err_msg=str(side)
            )


@pytest.mark.parametrize("orientation", [1, 6])
def test_of_a_file_that_lacks_scans_the_bytes_are_kept(decoder: str, orientation: int) -> None:
    """Boxes of it, decoded alone, are not those of the whole: what is missing is guessed."""
    for data in cut_before_scans(example_photographs.jpeg(CAT, SUBSAMPLING[2], progressive=True)):
        encoded = np.frombuffer(with_orientation(data, orientation), np.uint8)
        assert decoding.decode_whole(encoded) is encoded


def test_of_a_damaged_file(decoder: str) -> None:
    """It is decoded, or not, as without."""
    rng = np.random.default_rng(3)
    seen = set()
    for kind, data in (
        ("jpeg", example_photographs.jpeg(CAT)),
        ("progressive", example_photographs.jpeg(CAT, progressive=True)),
        ("png", cv2.imencode(".png", CAT)[1].tobytes()),
    ):
        for number in range(12):
            damaged = bytearray(data)
            at = int(len(data) * rng.uniform(0.3, 0.95))
            if number % 2:
                damaged[at:-2] = bytes(len(data) - at - 2)
            else:
                damaged[at : at + 20] = rng.integers(0, 256, 20, np.uint8).tobytes()
            encoded = np.frombuffer(bytes(damaged), np.uint8)
            whole = decoding.decode_whole(encoded)
            for box in boxes(len(CAT), len(CAT[0]), 5, rng):
                found, expected = tried(decoding.cut_box, whole, box), tried(decoding.decode_box, encoded, box)
                np.testing.assert_array_equal(found, expected)
            seen.add((kind, whole.ndim))
    assert seen >= {("jpeg", 3), ("progressive", 1), ("png", 1)}


def tried(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except ValueError as error:
        return str(error)
