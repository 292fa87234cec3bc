"""Fingerprints of what prepares samples: equal if two processes would prepare the same sample for a key.

One is made of the pickles of the data set, the pipeline and ``worker_init_fn``, of the files in which the classes and
functions in them are defined, of the versions of Python, NumPy and PyTorch, and of the paths of the environment and the
working directory. What is not in there, such as data files that have the same path and another content, is left to a
comparison of the first samples (prepared_samples.py).
"""

from __future__ import annotations

import io
import pickle
import sys
from hashlib import blake2b
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch

from minato_gpu.memory.blobs import BlobPickler


class _NamingPickler(BlobPickler):
    """Notes the modules of classes and functions in what it pickles."""

    modules: set[str]

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)):
            self.modules.add(obj.__module__)
        return super().reducer_override(obj)


def fingerprint(*parts: Any) -> str:
    """Returns the fingerprint of these objects, 32 hexadecimal digits. Raises whatever pickling does."""
    found = blake2b(digest_size=16)
    pickled = io.BytesIO()

    def add(buffer: pickle.PickleBuffer) -> None:
        found.update(buffer.raw())

    pickler = _NamingPickler(pickled, add)
    pickler.modules = set()
    pickler.dump((*parts, sys.version, sys.prefix, np.__version__, torch.__version__, str(Path.cwd())))
    found.update(pickled.getvalue())
    for name in sorted(pickler.modules):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is not None and (file := Path(path)).exists():
            found.update(file.read_bytes())
    return found.hexdigest()
