"""The JSON document that every command and benchmark can leave: date, machine, versions, settings and rows.

Rows are flat mappings with snake_case keys, the unit as suffix (``_s``, ``_ms``, ``_us``, ``_bytes``). Figures
mean nothing without the machine and the versions that they were taken with, so those are always there; the
name of the host and paths of the machine are not, because the document is meant to be passed on.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile

from minato_gpu.samples import JSON, plain
from minato_gpu.util.threads import usable_cores

_PACKAGES = (
    "minato-gpu",
    "torch",
    "numpy",
    "opencv-python-headless",
    "nvidia-dali-cuda130",
    "nvidia-dali-cuda120",
    "nvidia-nvimgcodec-cu13",
    "nvidia-nvjpeg",
    "cupy-cuda13x",
    "cupy-cuda12x",
)


def machine() -> dict[str, JSON]:
    """The processor, the cores that this process may use, the memory in bytes, the GPUs, the system."""
    import psutil

    return {
        "processor": _processor_name(),
        "cores": usable_cores(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "gpus": _gpu_names(),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions(extra: Iterable[str] = ()) -> dict[str, str]:
    """Versions of Python and of the packages that decide what a figure means, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in (*_PACKAGES, *extra):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def document(settings: Mapping[str, JSON], rows: Sequence[Mapping[str, JSON]], **more: JSON) -> dict[str, JSON]:
    """The whole document; ``more`` adds keys beside the five. The date is that of now, in UTC."""
    return {
        **more,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "settings": dict(settings),
        "rows": [dict(row) for row in rows],
    }


def write(content: Mapping[str, JSON], path: str | os.PathLike[str]) -> None:
    """Writes the document as JSON to ``path``, or to standard output where ``path`` is ``-``.

    A file appears whole or not at all; folders that are missing are made. Numbers that JSON cannot say (NaN, infinity)
    are written as null. Raises OSError where ``path`` cannot be written.
    """
    text = json.dumps(plain(content), indent=2, allow_nan=False) + "\n"
    if os.fspath(path) == "-":
        sys.stdout.write(text)
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, text.encode())


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that appears whole or not at all. Raises OSError where ``path`` cannot be written."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Finds out now whether ``write`` can write to ``path`` later; nothing is left there.

    Makes a file without a name in its folder, or in the nearest above that exists. Raises OSError where that fails, or
    ``path`` is something else than a file.
    """
    target = Path(path).absolute()
    if target.exists() and not target.is_file():
        raise OSError("there is something else than a file")
    with TemporaryFile(dir=next(folder for folder in target.parents if folder.exists())):
        pass


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _gpu_names() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
