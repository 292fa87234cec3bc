"""Decodes a box of a photograph on the CPU.

By nvImageCodec, which comes with DALI and is its decoder, so that both lanes have the same; it decodes no more of a
JPEG than the box's rows need. OpenCV, where nvImageCodec is not installed, decodes the whole picture. Both use
libjpeg-turbo, and libwebp for WebP: the pixels are the same.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from minato_gpu.util.messages import from_extra

from .headers import Header, read_header, repaired
from .jpeg_scans import has_all_scans

with from_extra("pipelines"):
    import cv2

# The accurate inverse transform, as OpenCV has it.
_OPTIONS = "libjpeg_turbo_decoder:fancy_upsampling={} libjpeg_turbo_decoder:fast_idct=0"

_NARROW = 8  # pixels

# A slot of the CPU lane is one core; OpenCV's own threads would take the other slots' cores.
cv2.setNumThreads(1)


@cache
def library() -> ModuleType | None:
    """nvImageCodec, or None where it is not installed, or refuses to work in this process.

    Importing it looks for GPUs, and may take some hundred megabytes of the current one, which is the first one unless
    the process has chosen another (``torch.cuda.set_device``). So every worker process imports it for itself, seeing
    no GPU; worker threads begin with their loader's device, or with that of the thread that started them.
    """
    try:
        with _no_gpu_for_workers():
            return importlib.import_module("nvidia.nvimgcodec")
    except (ImportError, RuntimeError):
        return None


@contextmanager
def _no_gpu_for_workers() -> Iterator[None]:
    """Context in which a worker process sees no GPU, unless it has initialised CUDA before. If it does so within, it
    sees none later either: so a stage of one's own that computes on a GPU in a worker calls ``torch.cuda.init()``
    before the first photograph."""
    name = "CUDA_VISIBLE_DEVICES"
    if get_worker_info() is None or torch.cuda.is_initialized():
        yield
        return
    seen = os.environ.get(name)
    os.environ[name] = ""
    try:
        yield
    finally:
        os.environ.pop(name)
        if seen is not None:
            os.environ[name] = seen


class _Decoder(threading.local):
    """One decoder for each thread of each process and each upsampling, made when it is first needed."""

    process = -1
    decoders: dict[bool, Any]
    params: Any = None

    def decode(self, codec: Any, stream: Any, fancy: bool) -> Any:
        if self.process != os.getpid():
            self.process, self.decoders = os.getpid(), {}
            self.params = codec.DecodeParams(apply_exif_orientation=True, sample_format=codec.SampleFormat.I_RGB)
        if fancy not in self.decoders:
            self.decoders[fancy] = codec.Decoder(
                device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
                max_num_cpu_threads=1,
                backends=[codec.Backend(codec.CPU_ONLY)],
                options=_OPTIONS.format(int(fancy)),
            )
        return self.decoders[fancy].decode(stream, params=self.params)


_decoder = _Decoder()


def check_upsampling(fancy: bool) -> None:
    """Raises ImportError for ``fancy=False`` where nvImageCodec, which alone can do that, is not installed."""
    if not fancy and importlib.util.find_spec("nvidia.nvimgcodec") is None:
        raise ImportError(
            "fancy_upsampling=False needs nvImageCodec, which comes with DALI: pip install 'minato-gpu[cuda13]' (or "
            "cuda12); OpenCV upsamples chroma smoothly in any case"
        )


def decode_box(encoded: Any, box: tuple[int, int, int, int], fancy: bool = True) -> Any:
    """The box (top, left, height, width) of the upright picture: uint8 (height, width, 3), RGB also if it is greyscale.

    ``encoded``: the bytes of a JPEG, PNG or WebP file, uint8 (n,). ``fancy``: a JPEG's chroma is upsampled smoothly
    ("fancy upsampling" of libjpeg), as OpenCV and Pillow have it, or (False) each value is repeated, as DALI and nvJPEG
    have it by default. Raises ValueError where it cannot be decoded, or where the picture is smaller than the box, and
    ImportError as ``check_upsampling`` does.
    """
    data = encoded.tobytes()
    try:
        header = read_header(data)
    except ValueError as error:
        raise ValueError(f"cannot decode this picture: {error}") from error
    return decode_repaired(as_repaired(encoded, data, header), box, fancy)


def as_repaired(encoded: Any, data: bytes, header: Header) -> Any:
    """Returns ``encoded``, whose bytes are ``data``: the same array, or uint8 (m,) with the header's repairs made."""
    return np.frombuffer(bytearray(repaired(data, header)), np.uint8) if header.repairs else encoded


def decode_repaired(encoded: Any, box: tuple[int, int, int, int], fancy: bool = True) -> Any:
    """Returns what ``decode_box`` returns, of what ``as_repaired`` returned; raises the same."""
    codec = library()
    if codec is None:
        check_upsampling(fancy)
        return _whole(encoded, box)
    return _region(codec, encoded, box, fancy)


def decode_whole(encoded: Any, fancy: bool = True) -> Any:
    """Returns the whole upright picture, from which ``cut_box`` cuts boxes: uint8 (height, width, 3), RGB.

    Returns ``encoded`` as it is, uint8 (n,), where it cannot be decoded, and for a progressive JPEG that lacks scans,
    whose boxes have other pixels when they are decoded alone.
    """
    data = encoded.tobytes()
    try:
        header = read_header(data)
        if data[:2] == b"\xff\xd8" and not has_all_scans(data):
            return encoded
        return decode_repaired(encoded, (0, 0, header.height, header.width), fancy)
    except ValueError:  # said of boxes that are affected
        return encoded


def cut_box(whole: Any, box: tuple[int, int, int, int], fancy: bool = True) -> Any:
    """Returns what ``decode_box(encoded, box, fancy)`` returns, from ``whole``, which ``decode_whole(encoded, fancy)``
    returned: the same pixels, as a view if ``whole`` is the picture. Raises ValueError where ``decode_box`` does."""
    if whole.ndim == 1:
        return decode_repaired(whole, box, fancy)
    top, left, height, width = box
    crop = whole[top : top + height, left : left + width]
    if crop.shape[:2] != (height, width):
        raise ValueError(f"the decoded picture is {whole.shape[1]} x {whole.shape[0]}, unlike its header")
    return crop


def _region(codec: Any, encoded: Any, box: tuple[int, int, int, int], fancy: bool) -> Any:
    top, left, height, width = box
    bottom, right = top + height, left + width
    try:
        stream = codec.CodeStream(encoded)
        rows, columns = stream.height, stream.width  # as coded, before the orientation is applied
    except RuntimeError as error:
        raise ValueError(f"nvImageCodec cannot decode this picture: {error}") from error
    if not (bottom <= rows and right <= columns) and not (bottom <= columns and right <= rows):
        raise ValueError(f"the coded picture is {columns} x {rows}, unlike its header")
    up, start, down, end = _wide(encoded, box) if min(height, width) < _NARROW else (top, left, bottom, right)
    image = _decoder.decode(codec, stream.get_sub_code_stream(region=codec.Region(up, start, down, end)), fancy)
    if image is None:
        raise ValueError("nvImageCodec cannot decode this picture")
    return np.asarray(image)[top - up : bottom - up, left - start : right - start]


def _wide(encoded: Any, box: tuple[int, int, int, int]) -> tuple[int, ...]:
    """More (top, left, bottom, right) than a narrow box, to be decoded in its place: of some JPEG files a single column
    at the edge, decoded alone, has other colours than in the whole picture."""
    header, (top, left, height, width) = read_header(encoded.tobytes()), box
    up = max(0, min(top, header.height - _NARROW))
    start = max(0, min(left, header.width - _NARROW))
    return (
        up,
        start,
        max(top + height, min(up + _NARROW, header.height)),
        max(left + width, min(start + _NARROW, header.width)),
    )


def _whole(encoded: Any, box: tuple[int, int, int, int]) -> Any:
    picture = cv2.imdecode(encoded, cv2.IMREAD_COLOR_RGB)
    if picture is None:
        raise ValueError("OpenCV cannot decode this picture")
    return cut_box(picture, box)
