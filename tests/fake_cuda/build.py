"""Builds the libraries that PyTorch's CUDA build asks for: ``python -m tests.fake_cuda.build PACKAGES HEADERS FOLDER``.

``cudart.cpp`` is the runtime, ``driver.cpp`` what is asked of a driver. Of all other libraries there is only what
PyTorch's link to: each name is a function that returns 0 (success), and 100 (no device) in the driver's library.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
_ASKING = ("torch_cuda", "c10_cuda", "torch_python", "torch_cuda_linalg", "caffe2_nvrtc", "torch_nvshmem")
_OTHERS = re.compile(r"(cublas|cudnn|cufft|curand|cusparse|nccl|cuFile|cusolver|nvrtc|nvshmem|cu[A-Z])\w+")
# With the versions of symbols that PyTorch's libraries ask for; None: none.
_LIBRARIES = {
    **{name: name for name in ("libcublas.so.13", "libcublasLt.so.13", "libcudnn.so.9", "libcufft.so.12")},
    **{name: name for name in ("libcusolver.so.12", "libcusparse.so.12", "libnvrtc.so.13")},
    "libnvshmem_host.so.3": "NVSHMEM",
    **dict.fromkeys(("libcufile.so.0", "libcusparseLt.so.0", "libnccl.so.2", "libcurand.so.10")),
}
_DRIVER = {"cuDriverGetVersion", "cuGetProcAddress", "cuGetProcAddress_v2", "cuDeviceGetCount"}


def build(packages: Path, headers: Path, folder: Path) -> None:
    """Builds into ``folder`` for the PyTorch in ``packages``. ``headers``: NVIDIA's wheels of the runtime, unpacked."""
    folder.mkdir(parents=True, exist_ok=True)
    runtime = headers / "nvidia/cu13"
    asked = {name for library in _ASKING for name in symbols(packages / f"torch/lib/lib{library}.so", "undefined")}
    known = symbols(runtime / "lib/libcudart.so.13", "defined")
    others = {name for name in asked if _OTHERS.fullmatch(name)}
    cudart, driver = HERE / "cudart.cpp", HERE / "driver.cpp"
    include = f"-I{runtime / 'include'}"
    _link(folder, "libcudart.so.13", stubs(asked & known, cudart), cudart, include, version="libcudart.so.13")
    for library, version in _LIBRARIES.items():
        _link(folder, library, stubs(others), version=version)
    of_driver = {name for name in others if re.match("cu[A-Z](?!ile)", name)} | _DRIVER
    beside = ("-L.", "-l:libcudart.so.13")
    _link(folder, "libcuda.so.1", stubs(of_driver, driver, answer=100), driver, *beside)
    # PyTorch asks for functions of NVML by name, and fails where one is missing.
    of_nvml = re.findall(rb"\0(nvml[A-Z]\w+)", (packages / "torch/lib/libc10_cuda.so").read_bytes())
    _link(folder, "libnvidia-ml.so.1", stubs({name.decode() for name in of_nvml}, driver), driver, *beside)


def symbols(library: Path, kind: str) -> set[str]:
    """Names of a library's dynamic symbols: "defined" or "undefined"."""
    command = ["nm", "--dynamic", f"--{kind}-only", str(library)]
    return parsed(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def parsed(listed: str) -> set[str]:
    """Names in what ``nm`` has printed, without their versions."""
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line.strip()}


def stubs(names: Iterable[str], beside: Path | None = None, *, answer: int = 0) -> str:
    """C++ of functions that return ``answer``, but for those which the source ``beside`` them has."""
    had = [] if beside is None else re.findall(r"^API .*?(\w+)\(", beside.read_text(encoding="utf-8"), re.MULTILINE)
    return "".join(f'extern "C" long {name}() {{ return {answer}; }}\n' for name in sorted({*names} - {*had}))


def _link(folder: Path, name: str, stubs: str, *more: Path | str, version: str | None = None) -> None:
    """A shared library. ``version``: of all its symbols; None: none."""
    (folder / "stubs.cpp").write_text(stubs, encoding="ascii")
    (folder / "symbols.map").write_text(f"{version} {{ global: *; }};\n", encoding="ascii")
    versions = [] if version is None else ["-Wl,--version-script=symbols.map"]
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{name}", *versions, "stubs.cpp"]
    subprocess.run([*command, *map(str, more), "-lpthread", "-o", name], cwd=folder, check=True)


if __name__ == "__main__":
    build(*map(Path, sys.argv[1:]))
