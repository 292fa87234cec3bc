"""Without CUDA libraries and devices everything imports and runs on the CPU, and says once that it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

_SCRIPT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"cupy", "cupyx", "nvidia", "pynvml"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import warnings
warnings.simplefilter("ignore")  # torch asks for the absent ones itself
import pkgutil, importlib
import minato_gpu
for module in pkgutil.walk_packages(minato_gpu.__path__, "minato_gpu."):
    if not module.name.startswith("minato_gpu.demo"):
        importlib.import_module(module.name)
from tests.support.numbers import PIPELINE, Numbers
for _ in range(2):
    loader = minato_gpu.DataLoader(Numbers(), 8, num_workers=1, pipeline=PIPELINE)
    print(sum(len(batch["label"]) for batch in loader))
"""


def test_everything_imports_and_runs_and_says_so_once() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["150", "150"]
    said = [line for line in done.stderr.splitlines() if "runs on the CPU alone" in line]
    assert len(said) == 1, done.stderr
