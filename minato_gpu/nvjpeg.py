"""Which nvJPEG nvImageCodec, DALI's decoder, has or will have in this process.

Before 13.2 nvImageCodec does not give nvJPEG a region of a JPEG with subsampled, smoothly upsampled chroma: such
pictures are decoded on the CPU, without a word. CUDA 12 has no newer one than 12.4, and where an older library lies
first in the path, or was loaded by another package, the installed one does not count. So the library itself is asked.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

_NAMES = ("libnvjpeg.so.13", "libnvjpeg.so.12")
_REGIONS_SINCE = (13, 2)

Version = tuple[int, int, int]


def loaded() -> Version | None:
    """The version of the library that is in this process; None where there is none yet."""
    return next(filter(None, (_ask(name, os.RTLD_NOLOAD) for name in _NAMES)), None)


def found() -> Version | None:
    """The version that is in this process, or that will be; it is then loaded, which creates no CUDA context."""
    places = (str(folder / name) for name in _NAMES for folder in _folders())
    return loaded() or next(filter(None, (_ask(file) for file in (*places, *_NAMES))), None)


def decodes_regions() -> bool:
    """Whether a GPU is given regions of all JPEGs, as far as can be told."""
    version = found()
    return version is None or version[:2] >= _REGIONS_SINCE


def engine_load() -> float:
    """Returns the share of JPEGs that DALI gives to the GPU's JPEG engine: ``MINATO_HW_DECODER_LOAD``, or 0.9."""
    said = os.environ.get("MINATO_HW_DECODER_LOAD", "0.9")
    try:
        load = float(said)
    except ValueError:
        load = -1.0
    if not 0 <= load <= 1:
        raise ValueError(f"MINATO_HW_DECODER_LOAD is {said!r}, and must be a number from 0 to 1")
    return load


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
