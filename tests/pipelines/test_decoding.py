"""The box that is decoded is the box of the whole decoded picture, with either decoder."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from pipelines import decoding, example_photographs
from pipelines.headers import read_header
from tests.pipelines.odd_photographs import ODD, as_pillow_reads
from tests.support import programs


def whole_picture(encoded: Any) -> Any:
    return cv2.imdecode(encoded, cv2.IMREAD_COLOR_RGB)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("photographs")
    example_photographs.write(folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def jpeg(shape: tuple[int, ...] = (40, 60, 3), **options: Any) -> Any:
    values = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    done, encoded = cv2.imencode(".jpg", cv2.GaussianBlur(values, (5, 5), 0), **options)
    assert done
    return encoded


def test_the_same_pixels_as_the_whole_picture(decoder: str, files: list[Path]) -> None:
    """Odd sizes, greyscale, every orientation, JPEG and PNG; boxes at every edge."""
    rng = np.random.default_rng(1)
    for path in files:
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


def test_progressive_and_subsampled(decoder: str) -> None:
    for options in ([cv2.IMWRITE_JPEG_PROGRESSIVE, 1], [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, 0x111111]):
        encoded = jpeg((111, 93, 3), params=options)
        whole = whole_picture(encoded)
        np.testing.assert_array_equal(decoding.decode_box(encoded, (17, 5, 50, 31)), whole[17:67, 5:36])


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
    encoded = jpeg()
    with pytest.raises(ValueError, match="cannot decode this picture"):
        decoding.decode_box(encoded[:30], (0, 0, 1, 1))
    with pytest.raises(ValueError, match="cannot decode this picture"):
        decoding.decode_box(np.frombuffer(b"no picture at all", np.uint8), (0, 0, 1, 1))
    for box in ((0, 0, 70, 60), (0, 30, 40, 40), (30, 0, 31, 20)):
        with pytest.raises(ValueError, match="is 60 x 40, unlike its header"):
            decoding.decode_box(encoded, box)


def test_a_png_with_alpha_or_a_palette(decoder: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (20, 30, 4), np.uint8)
    Image.fromarray(values).save(tmp_path / "alpha.png")
    Image.fromarray(values[..., :3]).quantize(16).save(tmp_path / "palette.png")
    for path in tmp_path.iterdir():
        encoded = np.fromfile(path, np.uint8)
        whole = whole_picture(encoded)
        np.testing.assert_array_equal(
            decoding.decode_box(encoded, (3, 4, 10, 20)), whole[3:13, 4:24], err_msg=path.name
        )


def test_each_thread_has_its_own_decoder() -> None:
    pytest.importorskip("nvidia.nvimgcodec")
    encoded, box = jpeg((300, 200, 3)), (10, 20, 200, 100)
    expected = decoding.decode_box(encoded, box)
    found: list[bool] = []
    decoders: set[int] = set()

    def decode() -> None:
        found.extend(bool((decoding.decode_box(encoded, box) == expected).all()) for _ in range(20))
        decoders.add(id(decoding._decoder.decoder))

    threads = [threading.Thread(target=decode) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60 and all(found)
    assert id(decoding._decoder.decoder) not in decoders


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
    encoded = jpeg()
    assert decoding.library() is None
    assert np.array_equal(decoding.decode_box(encoded, (1, 2, 20, 30)), whole_picture(encoded)[1:21, 2:32])


_BUILT = """
import sys, minato_gpu.pipeline, pipelines.image_classification
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
