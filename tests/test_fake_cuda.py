"""Of the stand-in for a GPU, what can be tested without PyTorch's build for CUDA. ``make rehearse`` tests the rest."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.fake_cuda import __main__ as command
from tests.fake_cuda import build, environment, imports

ROOT = Path(__file__).parents[1]


def test_a_rehearsal_without_pytorch_for_cuda_says_so_and_stops(tmp_path: Path) -> None:
    python = tmp_path / "bin/python"  # of the environment; its pip finds nothing
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'ERROR: first' >&2; echo 'ERROR: no network' >&2; exit 1\n", encoding="ascii")
    python.chmod(0o755)
    given = ["make", "rehearse", f"REHEARSAL={tmp_path}", f"PYTHON_REHEARSAL={sys.executable}"]
    done = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode and len(said) == 1 and said[0].startswith("no rehearsal: "), done.stderr
    if (sys.platform, sys.version_info[:2]) == ("linux", (3, 11)) and shutil.which("g++"):  # else it says so
        assert "torch==2.11.0 for CUDA" in said[0] and said[0].endswith(": ERROR: no network")
    assert not (tmp_path / ".installed").exists()


@pytest.mark.parametrize(
    ("what", "value", "why"),
    [
        ("sys.platform", "darwin", "Linux on x86_64 only"),
        ("sys.version_info", (3, 13, 0), "PYTHON_REHEARSAL"),
        ("shutil.which", lambda tool: None if tool == "g++" else tool, r"needs g\+\+, to"),
    ],
)
def test_a_machine_that_cannot_is_told_why(what: str, value: object, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sys.version_info", (3, 12, 1))
    monkeypatch.setattr("shutil.which", str)
    environment.check_machine()
    monkeypatch.setattr(what, value)
    with pytest.raises(environment.Impossible, match=why):
        environment.check_machine()


def test_all_that_is_locked_is_installed_but_pytorch() -> None:
    found = environment.locked((ROOT / "requirements.lock").read_text(encoding="utf-8"))
    assert {"torch", "torchdata", "numpy"} & {line.partition("==")[0] for line in found} == {"torchdata", "numpy"}
    assert all("==" in line for line in found)


def test_names_of_symbols_have_no_versions() -> None:
    listed = (
        "                 U cudaMalloc@libcudart.so.13\n00000000000c0de0 T cuInit@@V1\n\n                 w plain\n"
    )
    assert build.parsed(listed) == {"cudaMalloc", "cuInit", "plain"}


def test_stubs_are_made_of_what_is_not_written() -> None:
    made = build.stubs(
        ["cudaMalloc", "cudaGetLastError", "cudaEventDestroy", "cudaGraphLaunch"], build.HERE / "cudart.cpp"
    )
    assert made == 'extern "C" long cudaGraphLaunch() { return 0; }\n'
    assert build.stubs(["b", "a"], answer=100).splitlines()[0] == 'extern "C" long a() { return 100; }'


def test_modules_are_changed_as_they_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_up.py").write_text("value = 1\n", encoding="ascii")
    change = ModuleType("change")
    change.install = lambda module: setattr(module, "value", module.value + 1)  # type: ignore[attr-defined]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    monkeypatch.setitem(sys.modules, "tests.fake_cuda.change", change)
    monkeypatch.setitem(imports.CHANGED, "made_up", "change")
    imports.install()
    try:
        assert importlib.import_module("made_up").value == 2
    finally:
        sys.modules.pop("made_up", None)


def test_python_without_a_stand_in_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LIBRARIES", tmp_path)
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("it went on"))
    with pytest.raises(SystemExit, match="make rehearse"):
        command.main()
