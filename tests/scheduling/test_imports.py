"""The room of decisions needs nothing but NumPy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import minato_gpu.scheduling.scheduler

ROOM = Path(minato_gpu.scheduling.scheduler.__file__).parent
MODULES = sorted(f"minato_gpu.scheduling.{path.stem}" for path in ROOM.glob("*.py") if path.stem != "__init__")
SCRIPT = """
import importlib, sys, types
package = types.ModuleType("minato_gpu")  # the package without its public names, which bring PyTorch
package.__path__ = [sys.argv[1]]
sys.modules["minato_gpu"] = package
for name in sys.argv[2:]:
    importlib.import_module(name)
standard = {*sys.stdlib_module_names, "cython_runtime"}  # the latter is part of NumPy's extensions
found = {name.partition(".")[0] for name in sys.modules}
print(sorted(name for name in found - standard if not name.startswith("_")))
print(sorted(n for n in sys.modules if n.startswith("minato_gpu.") and not n.startswith("minato_gpu.scheduling")))
"""


def test_nothing_but_numpy_is_imported() -> None:
    home = str(Path(np.__file__).parents[1])
    script = f"import sys; sys.path.append({home!r})\n{SCRIPT}"
    command = [sys.executable, "-I", "-S", "-c", script, str(ROOM.parent), *MODULES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    third_parties, ours = done.stdout.splitlines()
    assert third_parties == str(["minato_gpu", "numpy"])
    assert ours in ("[]", str(["minato_gpu.samples"]))
