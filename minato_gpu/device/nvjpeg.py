"""Which nvJPEG nvImageCodec, DALI's decoder, has or will have in this process.

Before 13.2 nvImageCodec does not give nvJPEG a region of a JPEG with subsampled, smoothly upsampled chroma: such
pictures are decoded on the CPU, without a word. CUDA 12 has no newer one than 12.4, and where an older library lies
first in the path, or was loaded by another package, the installed one does not count. So the library itself is asked.

nvImageCodec 0.9.0 fails on regions (error 8) on A100 and GB200 and ends the process (SIGSEGV) on H100 and B200:
NVIDIA/nvImageCodec#55. With it whole pictures are decoded and cut on the GPU.

nvJPEG's hardware engine was seen to write its output on an H100 before its stream's turn, into memory that work before
it still reads (pytorch/vision#9606, meta-pytorch/torchcodec#1634). So a lane that gives it pictures waits on the host,
until its stream is idle, before each run of a graph that decodes.

Neither was seen on an H200 (driver 580.159.04, nvJPEG 13.3.2, nvImageCodec 0.9.0.20): regions and whole pictures are
decoded, by the engine too, and right beside other work. By the engine 64 whole pictures at a time come at 3,609 a
second for 0.38 ms of CPU each, by regions at 3,399; without it at 1,305 for 2.8 ms.

Three variables of the environment decide otherwise, for a machine on which it was measured what is right and fastest
(``python -m benchmarks.gpu_session --part probe``): ``MINATO_JPEG_REGIONS`` (0 or 1: decode regions),
``MINATO_HW_DECODER_LOAD`` (0 to 1: the share of JPEGs for the engine) and ``MINATO_DECODING_WAITS`` (0 or 1).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
from contextlib import suppress
from pathlib import Path

_NAMES = ("libnvjpeg.so.13", "libnvjpeg.so.12")
_REGIONS_SINCE = (13, 2)
_CODECS = ("nvidia-nvimgcodec-cu13", "nvidia-nvimgcodec-cu12")
_BREAKS_REGIONS = "0.9.0"
# GPUs on which the engine was measured never to write early, and nvJPEG's version then (benchmarks/results)
_NEVER_EARLY = {"NVIDIA H200": (13, 3, 2)}
_USUAL_ENGINE_LOAD = 1.0  # what it does not take costs cores, 2.8 ms a photograph on an H200's host

REGIONS, ENGINE_LOAD, WAITS = "MINATO_JPEG_REGIONS", "MINATO_HW_DECODER_LOAD", "MINATO_DECODING_WAITS"

Version = tuple[int, int, int]


def loaded() -> Version | None:
    """The version of the library that is in this process; None where there is none yet."""
    return next(filter(None, (_ask(name, os.RTLD_NOLOAD) for name in _NAMES)), None)


def found() -> Version | None:
    """The version that is in this process, or that will be; it is then loaded, which creates no CUDA context."""
    places = (str(folder / name) for name in _NAMES for folder in _folders())
    return loaded() or next(filter(None, (_ask(file) for file in (*places, *_NAMES))), None)


def decodes_regions() -> bool:
    """Whether a GPU decodes regions of all JPEGs, as far as can be told. Raises ValueError for ``MINATO_JPEG_REGIONS``
    other than 0 and 1."""
    wanted = _switch(REGIONS)
    if wanted is not None:
        return wanted
    if codec_version().startswith(_BREAKS_REGIONS):
        return False
    version = found()
    return version is None or version[:2] >= _REGIONS_SINCE


def engine_load() -> float:
    """The share of JPEGs that the GPU's hardware engine is given, 0.0 to 1.0. Raises ValueError for a
    ``MINATO_HW_DECODER_LOAD`` that is no such number."""
    wanted = os.environ.get(ENGINE_LOAD)
    if wanted is None:
        return _USUAL_ENGINE_LOAD
    try:
        load = float(wanted)
    except ValueError:
        load = -1.0
    if not 0.0 <= load <= 1.0:
        raise ValueError(f"{ENGINE_LOAD} must be a number from 0 to 1, got {wanted!r}")
    return load


def decoding_waits(gpu: str = "") -> bool:
    """Whether a device lane waits on the host for its stream before each run of a graph that decodes, on a GPU of this
    name ("": any). Raises ValueError for ``MINATO_DECODING_WAITS`` other than 0 and 1."""
    wanted = _switch(WAITS)
    if wanted is not None:
        return wanted
    measured = gpu in _NEVER_EARLY and (found() or (0, 0, 0)) >= _NEVER_EARLY[gpu]
    return engine_load() > 0.0 and not measured


def _switch(name: str) -> bool | None:
    """A variable of the environment that is 0 or 1; None where it is not set."""
    wanted = os.environ.get(name)
    if wanted not in (None, "0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {wanted!r}")
    return None if wanted is None else wanted == "1"


def codec_version() -> str:
    """The version of nvImageCodec that is installed; "" where there is none. It is not imported."""
    for name in _CODECS:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def _folders() -> list[Path]:
    """Where nvImageCodec looks first: in the path of the environment, then in the packages beside it."""
    environment = [Path(one) for one in os.environ.get("LD_LIBRARY_PATH", "").split(":") if one]
    spec = importlib.util.find_spec("nvidia")
    packages = [] if spec is None else list(spec.submodule_search_locations or [])
    return environment + [Path(one) / each for one in packages for each in ("cu13/lib", "nvjpeg/lib")]


def _ask(library: str, mode: int = 0) -> Version | None:
    try:
        opened = ctypes.CDLL(library, mode=mode | os.RTLD_NOW)
        values = [ctypes.c_int() for _ in range(3)]
        if any(opened.nvjpegGetProperty(kind, ctypes.byref(value)) for kind, value in enumerate(values)):
            return None
    except (OSError, AttributeError):
        return None
    major, minor, patch = (value.value for value in values)
    return major, minor, patch
