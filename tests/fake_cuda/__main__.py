"""Runs a module on the stand-in for a GPU: ``python -m tests.fake_cuda MODULE ARGUMENTS...``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LIBRARIES = Path(sys.prefix) / "fake_cuda"


def main() -> None:
    """Starts Python anew: the dynamic linker reads the environment only as a program starts."""
    if not (LIBRARIES / "libcuda.so.1").exists():
        sys.exit(f"{sys.prefix} has no stand-in for CUDA: run `make rehearse`, which makes an environment with one")
    for name, first in (("LD_LIBRARY_PATH", LIBRARIES), ("PYTHONPATH", Path(__file__).parent / "startup")):
        os.environ[name] = os.pathsep.join([str(first), *filter(None, [os.environ.get(name)])])
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])


if __name__ == "__main__":
    main()
