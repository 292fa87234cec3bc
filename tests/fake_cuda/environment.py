"""Makes the environment of a rehearsal: ``python -m tests.fake_cuda.environment FOLDER``.

The Python that runs it is the environment's. All versions are those of requirements.lock, but for PyTorch, whose build
for CUDA is taken from PyPI without the CUDA libraries that it asks for: ``build`` makes them.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.fake_cuda import build

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.11.0"
TORCHVISION = "torchvision==0.26.0"  # loaders that are compared with ours ask for it; without it they are left out
HEADERS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")


class Impossible(Exception):
    """Why there can be no rehearsal here, in one sentence."""


def make(folder: Path) -> None:
    """Makes the environment, or completes one that was begun."""
    check_machine()
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    install(python, [TORCH], f"{TORCH} for CUDA (530 MB) cannot be had")
    packages = Path(_said(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    if not (packages / "torch/lib/libtorch_cuda.so").exists():
        raise Impossible(f"{TORCH} was found without CUDA: pip must take it from PyPI")
    install(
        python, locked((ROOT / "requirements.lock").read_text(encoding="utf-8")), "the locked packages cannot be had"
    )
    try:
        install(python, [TORCHVISION], "")
    except Impossible:
        sys.stderr.write(f"{TORCHVISION} cannot be had: what needs it is left out\n")
    with tempfile.TemporaryDirectory() as name:
        wheels = Path(name)
        pip(python, "download", "--dest", name, *HEADERS, why="the headers of CUDA's runtime cannot be had")
        for wheel in wheels.glob("*.whl"):
            shutil.unpack_archive(wheel, wheels, "zip")
        build.build(packages, wheels, folder / "fake_cuda")


def check_machine() -> None:
    """Raises Impossible where it cannot be built."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise Impossible("PyTorch's build for CUDA, over a stand-in, runs on Linux on x86_64 only")
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        raise Impossible("it needs Python 3.11 or 3.12: set PYTHON_REHEARSAL=/path/to/python3.12")
    missing = [tool for tool in ("g++", "nm") if shutil.which(tool) is None]
    if missing:
        raise Impossible(f"it needs {' and '.join(missing)}, to build the stand-in with")


def locked(text: str) -> list[str]:
    """Lines of a lock file that name packages, without PyTorch."""
    return [line for line in text.splitlines() if re.match(r"\w", line) and not line.startswith("torch==")]


def install(python: Path, packages: Sequence[str], why: str) -> None:
    """Installs packages without what they depend on, which is locked or not wanted."""
    pip(python, "install", *packages, why=why)


def pip(python: Path, command: str, *arguments: str, why: str) -> None:
    """Runs pip. Raises Impossible with ``why`` and pip's last line."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [python, "-m", "pip", command, *options, *arguments], stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise Impossible(f"{why}: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}")


def _said(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    try:
        make(Path(sys.argv[1]).resolve())
    except Impossible as error:
        sys.exit(f"no rehearsal: {error}")
