"""Pipeline definition modules, one per workload: ``minato_gpu.pipelines``, and in a clone ``pipelines`` too.

A module that the commands can use by name (``minato-gpu check pipelines.image_classification``) has three
module-level functions (or classes):

- ``pipeline()`` returns the ``minato_gpu.Pipeline`` with its default settings;
- ``dataset(directory)`` returns a map-style data set over the files there, whose items are the pipeline's input
  fields (a "path" among them, where there is one, is shown in errors);
- ``example_data(directory)`` writes a small data set that ``dataset`` can open, without downloading anything.

Importing such a module must not import DALI, CuPy or CUDA: device implementations get those as arguments.
"""

import sys

if __name__ == "pipelines":  # in a clone; ``minato_gpu/pipelines`` is a link to this folder
    from importlib import import_module
    from importlib.abc import Loader, MetaPathFinder
    from importlib.machinery import ModuleSpec
    from importlib.util import find_spec
    from typing import Any

    class _Alias(MetaPathFinder, Loader):
        """``pipelines.NAME`` is the very module ``minato_gpu.pipelines.NAME``, so that pickles have one name for it."""

        def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
            there = name.startswith("pipelines.") and find_spec(f"minato_gpu.{name}") is not None
            return ModuleSpec(name, self) if there else None

        def exec_module(self, module: Any) -> None:
            sys.modules[module.__name__] = import_module(f"minato_gpu.{module.__name__}")

    sys.modules["pipelines"] = import_module("minato_gpu.pipelines")
    sys.meta_path.insert(0, _Alias())
