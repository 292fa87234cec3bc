"""Changes modules as soon as they are imported, in whichever process that is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

CHANGED = {
    "torch": ("kernels", "install"),
    "nvidia.dali.backend_impl": ("dali", "install"),
    "torchvision.io.image": ("kernels", "install_pictures"),
}
"""Modules, and which function of which module here is called with each."""

REPLACED = {"cupy": "arrays.py"}


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in REPLACED:
            return spec_from_file_location(name, Path(__file__).parent / REPLACED[name])
        spec = PathFinder.find_spec(name, path, target) if name in CHANGED else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            where, install = CHANGED[name]
            getattr(importlib.import_module(f"{__package__}.{where}"), install)(module)

        loader.exec_module = execute_and_change
        return spec


def install() -> None:
    """Lets modules be changed that are imported from now on."""
    sys.meta_path.insert(0, _Finder())
