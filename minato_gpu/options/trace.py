"""Checks the argument ``trace``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from minato_gpu.util.messages import from_extra
from minato_gpu.util.numbers import nbytes

_LIMIT = 256 << 20  # two million samples that are recorded one by one
_LEAST = 4000  # some batches, beside what every trace begins with


@dataclass(frozen=True)
class TraceOptions:
    """The path of the trace, and how many bytes it may take."""

    path: Path
    limit: int = _LIMIT

    @classmethod
    def check(cls, trace: Any) -> TraceOptions | None:
        """Resolves the argument.

        Raises ValueError (or TypeError) that names what is wrong, and ModuleNotFoundError without what the extra
        ``trace`` brings.
        """
        if trace is None:
            return None
        given = dict(trace) if isinstance(trace, Mapping) else {"path": trace}
        if "path" not in given or set(given) - {"path", "bytes"}:
            raise ValueError(f"trace must be a path, or name 'path' and perhaps 'bytes', got {trace!r}")
        if not isinstance(given["path"], (str, os.PathLike)):
            raise TypeError(f"trace must be a path, such as 'run.pftrace', got {given['path']!r}")
        path = Path(os.fsdecode(given["path"])).absolute()
        if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise ValueError(f"trace={str(path)!r} cannot be written; name a file in a directory that can be")
        with from_extra("trace"):
            import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
        if given.get("bytes") is None:
            return cls(path)
        limit = nbytes("trace", given["bytes"], "leave it out for no trace")
        if limit < _LEAST:
            raise ValueError(f"trace: a file takes at least {_LEAST} bytes, got {given['bytes']!r}; pass more")
        return cls(path, limit)
