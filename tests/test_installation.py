"""As users install it: what a wheel brings, both names of the pipelines in a clone, and which extra an error names."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.support import programs

ROOT = Path(__file__).parents[1]
PACKAGES = Path(np.__file__).parents[1]
# What pip asks for a wheel, in the folder with the source. Argument: a folder for it.
_WHEEL = """
import importlib, sys, tomllib
with open("pyproject.toml", "rb") as file:
    system = tomllib.load(file)["build-system"]
importlib.import_module(system["build-backend"]).build_wheel(sys.argv[1])
"""

# In the folder of a user who has folders of these names, too.
_BESIDE = """
import importlib, os, sys
import benchmarks, minato_gpu, pipelines, pipelines.mine
from minato_gpu.lab.cli import main
from minato_gpu.pipelines import headers, image_classification
here = os.getcwd()
assert os.path.dirname(minato_gpu.__file__) == os.path.join(sys.argv[1], "minato_gpu"), minato_gpu.__file__
assert os.path.dirname(pipelines.__file__) == os.path.join(here, "pipelines")
assert os.path.dirname(benchmarks.__file__) == os.path.join(here, "benchmarks")
assert image_classification.build.__module__ == "minato_gpu.pipelines.image_classification"
for name in ("pipelines.mine", "pipelines.headers", "minato_gpu.pipelines.headers", "pipelines.nothing"):
    try:
        main(["check", name], standalone_mode=False)
    except Exception as error:
        print(error)
"""
# Each module in turn, without one of the packages.
_WITHOUT = """
import importlib, sys
for given in sys.argv[1:]:
    absent, name = given.split(":")
    again = ("minato_gpu.pipelines", "minato_gpu.lab.demo", "benchmarks")
    for module in [module for module in sys.modules if module.startswith(again)]:
        del sys.modules[module]
    there = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == absent}
    sys.modules[absent] = None
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(absent, error.name == absent, error)
    del sys.modules[absent]
    sys.modules.update(there)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but what a wheel of this version puts there."""
    source = tmp_path_factory.mktemp("source")
    for name in ("minato_gpu", "pipelines", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    made = tmp_path_factory.mktemp("made")
    subprocess.run([sys.executable, "-c", _WHEEL, made], cwd=source, check=True, capture_output=True)
    (wheel,) = made.iterdir()
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
        archive.extractall(target)  # what installing does with pure Python
    assert {top for top in tops if not top.endswith(".dist-info")} == {"minato_gpu"}
    return target


def test_a_wheel_leaves_other_folders_alone(installed: Path, tmp_path: Path) -> None:
    for name in ("pipelines", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "pipelines" / "mine.py").touch()
    (tmp_path / "program.py").write_text(_BESIDE)
    # Without site, no editable install of this folder takes part.
    path = os.pathsep.join(map(str, (installed, PACKAGES)))
    command = [sys.executable, "-S", "program.py", str(installed)]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    theirs, ours, same, nothing = done.stdout.splitlines()
    assert theirs.startswith("pipelines.mine defines no pipeline")
    assert ours.startswith("pipelines.headers defines no pipeline")
    assert same.startswith("minato_gpu.pipelines.headers defines no pipeline")
    assert nothing == "no module named pipelines.nothing, from here or installed"


def test_every_module_of_ours_is_installed(installed: Path) -> None:
    for name, folder in {"minato_gpu": ROOT / "minato_gpu", "minato_gpu/pipelines": ROOT / "pipelines"}.items():
        ours = {path.relative_to(folder) for path in folder.rglob("*.py")}
        assert ours <= {path.relative_to(installed / name) for path in (installed / name).rglob("*.py")}


def test_both_names_in_a_clone_are_one_module() -> None:
    for name in ("", ".image_classification", ".decoding"):
        ours = importlib.import_module(f"minato_gpu.pipelines{name}")
        assert importlib.import_module(f"pipelines{name}") is ours
        assert ours.__name__ == f"minato_gpu.pipelines{name}"
        assert ours.__spec__ is not None and ours.__spec__.name == ours.__name__
    built = importlib.import_module("pipelines.image_classification").build(size=8)
    data = pickle.dumps(built)
    assert data == pickle.dumps(importlib.import_module("minato_gpu.pipelines.image_classification").build(size=8))
    assert b"minato_gpu.pipelines" in data
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'pipelines\.nothing'"):
        importlib.import_module("pipelines.nothing")


def test_spawned_workers_in_a_clone(tmp_path: Path) -> None:
    samples, batches = programs.run("tests.support.clone_program", str(tmp_path)).split()
    assert samples == batches


def test_an_absent_package_is_told_of_with_its_extra() -> None:
    asked = [
        "cv2:pipelines.image_classification",
        "cv2:minato_gpu.pipelines.object_detection",
        "scipy:pipelines.segmentation_3d",
        "cv2:minato_gpu.lab.demo.run",
        "PIL:minato_gpu.lab.demo.run",
        "cv2:benchmarks.compare.__main__",
    ]
    lines = programs.run("tests.support.source", _WITHOUT, *asked).splitlines()
    for said, (absent, _) in zip(lines, (each.split(":") for each in asked), strict=True):
        bring = "demo|bench" if absent == "PIL" else "pipelines|demo|bench"  # each brings what the one before brings
        named = rf"{absent} True No module named '{absent}': it comes with pip install 'minato-gpu\[({bring})\]'"
        assert re.fullmatch(named, said), said


@pytest.mark.parametrize(
    ("absent", "module", "function", "extra"),
    [
        ("soundfile", "speech_stages", "library", "pipelines"),
        ("espeakng_loader", "example_voices", "_espeak", "demo"),
        ("skimage", "example_photographs", "photograph", "demo"),
    ],
)
def test_a_package_that_only_some_files_need(
    monkeypatch: pytest.MonkeyPatch, absent: str, module: str, function: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    asked = getattr(importlib.import_module(f"minato_gpu.pipelines.{module}"), function)
    arguments = ["cat.png"] if absent == "skimage" else []
    with pytest.raises(ModuleNotFoundError, match=rf"'{absent}': it comes with pip install 'minato-gpu\[{extra}\]'"):
        getattr(asked, "__wrapped__", asked)(*arguments)  # what a cache remembers is none of this test's
