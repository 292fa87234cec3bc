"""Finds which nvJPEG DALI's decoder (nvImageCodec) uses in this process, and which of its features can be trusted.

Regions: with nvJPEG before 13.2, nvImageCodec silently decodes regions of JPEGs with subsampled, smoothly upsampled
chroma on the CPU. CUDA 12 has nothing newer than 12.4, and an older library that is first in the path or loaded by
another package hides the installed one; so the library itself is asked.

nvImageCodec 0.9.0 fails on regions (error 8) on A100 and GB200 and crashes the process (SIGSEGV) on H100 and B200:
NVIDIA/nvImageCodec#55. With it whole images are decoded and cropped on the GPU.

Early writes: on an H100 nvJPEG's hardware engine was seen to write its output before its stream's turn, into memory
that earlier work still read (pytorch/vision#9606, meta-pytorch/torchcodec#1634). So a lane that uses the engine waits
on the host until its stream is idle before each run of a graph that decodes.

Neither was seen on an H200 (driver 580.159.04, nvJPEG 13.3.2, nvImageCodec 0.9.0.20). There the engine decodes 3,609
whole images per second in batches of 64 for 0.38 ms of CPU each, 3,399 by regions; without it 1,305 for 2.8 ms.

Three environment variables override this where a machine was measured (``python -m benchmarks.gpu_session --part
probe``): ``MINATO_JPEG_REGIONS`` (0 or 1: decode regions), ``MINATO_HW_DECODER_LOAD`` (0 to 1: the engine's share of
JPEGs) and ``MINATO_DECODING_WAITS`` (0 or 1).
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
# GPUs on which the engine was measured not to write early, with nvJPEG's version (benchmarks/results)
_NEVER_EARLY = {"NVIDIA H200": (13, 3, 2)}
_USUAL_ENGINE_LOAD = 1.0  # an image that the engine does not decode costs 2.8 ms of CPU (H200's host)

REGIONS, ENGINE_LOAD, WAITS = "MINATO_JPEG_REGIONS", "MINATO_HW_DECODER_LOAD", "MINATO_DECODING_WAITS"

Version = tuple[int, int, int]


def loaded() -> Version | None:
    """Returns the version of the nvJPEG loaded in this process; None where there is none."""
    return next(filter(None, (_version_of(name, os.RTLD_NOLOAD) for name in _NAMES)), None)


def found() -> Version | None:
    """Returns the version that is loaded or will be, after loading it; None where there is none. Creates no CUDA
    context."""
    places = (str(folder / name) for name in _NAMES for folder in _folders())
    return loaded() or next(filter(None, (_version_of(file) for file in (*places, *_NAMES))), None)


def decodes_regions() -> bool:
    """Returns whether the GPU decodes regions of all JPEGs. Where no nvJPEG is found it is taken to do so, unless
    nvImageCodec is the version that fails on them. Raises ValueError for ``MINATO_JPEG_REGIONS`` other than 0 and 1."""
    wanted = _switch(REGIONS)
    if wanted is not None:
        return wanted
    if codec_version().startswith(_BREAKS_REGIONS):
        return False
    version = found()
    return version is None or version[:2] >= _REGIONS_SINCE


def engine_load() -> float:
    """Returns the share of JPEGs for the GPU's hardware engine, 0.0 to 1.0. Raises ValueError for a
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
    """Returns whether a device lane waits for its stream before each run of a graph that decodes, on a GPU of this name
    ("": any). Raises ValueError for ``MINATO_DECODING_WAITS`` other than 0 and 1, or as ``engine_load`` does."""
    wanted = _switch(WAITS)
    if wanted is not None:
        return wanted
    measured = gpu in _NEVER_EARLY and (found() or (0, 0, 0)) >= _NEVER_EARLY[gpu]
    return engine_load() > 0.0 and not measured


def _switch(name: str) -> bool | None:
    """Returns an environment variable that is 0 or 1; None where it is not set. Raises ValueError otherwise."""
    wanted = os.environ.get(name)
    if wanted not in (None, "0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {wanted!r}")
    return None if wanted is None else wanted == "1"


def codec_version() -> str:
    """Returns the installed version of nvImageCodec; "" without one. It is not imported."""
    for name in _CODECS:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def _folders() -> list[Path]:
    """Returns the folders in which nvImageCodec looks first: those of LD_LIBRARY_PATH, then the packages beside it."""
    environment = [Path(one) for one in os.environ.get("LD_LIBRARY_PATH", "").split(":") if one]
    spec = importlib.util.find_spec("nvidia")
    packages = [] if spec is None else list(spec.submodule_search_locations or [])
    return environment + [Path(one) / each for one in packages for each in ("cu13/lib", "nvjpeg/lib")]


def _version_of(library: str, mode: int = 0) -> Version | None:
    try:
        opened = ctypes.CDLL(library, mode=mode | os.RTLD_NOW)
        values = [ctypes.c_int() for _ in range(3)]
        if any(opened.nvjpegGetProperty(kind, ctypes.byref(value)) for kind, value in enumerate(values)):
            return None
    except (OSError, AttributeError):
        return None
    major, minor, patch = (value.value for value in values)
    return major, minor, patch
