"""What may be imported: decisions need NumPy alone, nothing that runs in production the lab, CUDA only in its room."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest

import minato_gpu

PACKAGE = Path(minato_gpu.__file__).parent
# Rooms, and modules beside them: each may import what stands before it, and what stands with it in the same line.
ORDER = """
util samples
pipeline
arguments
scheduling caching
memory
sources
lanes
device
observe
sampling
checkpoint
window
estimates
faults
options
engine
epoch
loader
accelerated
pipelines
__init__
lab
__main__
"""
SCRIPT = """
import importlib, sys, types
package = types.ModuleType("minato_gpu")  # the package without its public names, which bring PyTorch
package.__path__ = [sys.argv[1]]
sys.modules["minato_gpu"] = package
for name in sys.argv[2:]:
    importlib.import_module(name)
standard = {*sys.stdlib_module_names, "cython_runtime"}  # the latter is part of NumPy's extensions
found = {name.partition(".")[0] for name in sys.modules}
print(*sorted(name for name in found - standard if not name.startswith("_")))
print(*sorted({".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("minato_gpu.")}))
"""
# An epoch with the parts of a loader that are imported late: workers, a budget, statistics.
PRODUCTION = """
import os, sys
os.chdir(sys.argv[1])
from minato_gpu import DataLoader
loader = DataLoader(list(range(8)), 2, num_workers=2, host_memory_budget=1 << 20)
assert sum(len(batch) for batch in loader) == 8
assert loader.stats()["samples_delivered"] == 8 and loader.timeline()
print(*sorted(name for name in sys.modules if name.startswith("minato_gpu")))
"""


@pytest.mark.parametrize(
    ("room", "others"), [("scheduling", set()), ("caching", set()), ("lab.simulation", {"scheduling", "lab"})]
)
def test_decisions_and_their_simulation_need_nothing_but_numpy(room: str, others: set[str]) -> None:
    home = str(Path(np.__file__).parents[1])
    modules = sorted(f"minato_gpu.{room}.{path.stem}" for path in PACKAGE.joinpath(*room.split(".")).glob("*.py"))
    script = f"import sys; sys.path.append({home!r})\n{SCRIPT}"
    command = [sys.executable, "-I", "-S", "-c", script, str(PACKAGE), *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    third_parties, ours = done.stdout.splitlines()
    assert third_parties.split() == ["minato_gpu", "numpy"]
    assert set(ours.split()) <= {f"minato_gpu.{name}" for name in {room, "samples", *others}}


def test_a_loader_at_work_does_not_load_the_lab(tmp_path: Path) -> None:
    """In a real interpreter: the one that programs are forked from has imported much."""
    command = [sys.executable, "-c", PRODUCTION, str(tmp_path)]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "minato_gpu.scheduling.scheduler" in loaded
    assert [name for name in loaded if name.startswith("minato_gpu.lab")] == []


def test_no_room_imports_one_that_comes_after_it() -> None:
    lines = [line.split() for line in ORDER.splitlines() if line]
    rank = {name: number for number, line in enumerate(lines) for name in line}
    found = {}
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        taken = {name.split(".")[1] for name in imported(path) if name.startswith("minato_gpu.")} & rank.keys()
        if late := {name for name in taken - {own} if rank[name] > rank[own]}:
            found[path.relative_to(PACKAGE).as_posix()] = late
    assert found == {}
    units = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert units - {"__pycache__"} == {*rank}


def test_no_file_imports_itself_by_way_of_others() -> None:
    parts = {path: path.relative_to(PACKAGE.parent).with_suffix("").parts for path in PACKAGE.rglob("*.py")}
    needs = {".".join(names): set(imported(path)) for path, names in parts.items()}
    for name, others in needs.items():
        others |= {one.rpartition(".")[0] for one in others}
        needs[name] = (others & needs.keys()) - {name}
    list(TopologicalSorter(needs).static_order())  # CycleError names it


def test_the_device_room_alone_imports_cuda() -> None:
    """What lies in the lab, and a pipeline's own stages, may."""
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(name.partition(".")[0] in {"cupy", "nvidia", "pynvml"} for name in imported(path))
        or re.search(r'import_module\("(cupy|nvidia|pynvml)', path.read_text(encoding="utf-8"))
    }
    assert {name for name in importers if not name.startswith(("device/", "lab/", "pipelines/"))} == set()


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Full names of the modules that a file imports, at its top or later, and of what it takes from them."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    package = ("minato_gpu", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (parents, node.module)))
            yield from (f"{module}.{name.name}" for name in node.names)


WITHOUT_CUDA = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"cupy", "cupyx", "nvidia", "pynvml"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import warnings
warnings.simplefilter("ignore")  # torch asks for the absent ones itself
import logging
logging.basicConfig(level=logging.INFO)
import pkgutil, importlib
import minato_gpu
for module in pkgutil.walk_packages(minato_gpu.__path__, "minato_gpu."):
    if not module.name.startswith(("minato_gpu.lab.demo", "minato_gpu.pipelines.torchvision")):
        importlib.import_module(module.name)
from tests.support.numbers import PIPELINE, Numbers
for _ in range(2):
    loader = minato_gpu.DataLoader(Numbers(), 8, num_workers=1, pipeline=PIPELINE)
    print(sum(len(batch["label"]) for batch in loader))
"""


def test_without_cuda_everything_imports_and_runs_and_says_so_once() -> None:
    command = [sys.executable, "-c", WITHOUT_CUDA]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["150", "150"]
    said = [line for line in done.stderr.splitlines() if "runs on the CPU alone" in line]
    assert len(said) == 1, done.stderr
