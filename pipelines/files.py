"""Where the bytes of a sample are: a whole file, or a part of one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class FilePart:
    """``length`` bytes of the file ``path`` from ``offset`` on, which it calls ``name``."""

    path: str
    offset: int
    length: int
    name: str

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"


def read_bytes(source: str | os.PathLike[str] | FilePart) -> Any:
    """The bytes of a file or of a part of one: uint8 (n,). Raises OSError, and EOFError for a part that is cut off."""
    if not isinstance(source, FilePart):
        return np.fromfile(source, np.uint8)
    data = np.fromfile(source.path, np.uint8, count=source.length, offset=source.offset)
    if len(data) != source.length:
        raise EOFError(f"the file ends {source.length - len(data)} bytes too early")
    return data
