"""torchvision's wheel beside a CPU build of torch, where its own operators do not load.

``make`` puts it into the folder ``.torchvision``, without its dependencies, and not into the environment: there
Lightning would import it, and fail.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

_FOLDER = Path(__file__).parents[2] / ".torchvision"
_declared: list[Any] = []  # a library's operators go with it


def import_torchvision() -> Any:
    """The package ``torchvision``; the tests of the module are skipped where it is not installed.

    When imported it registers fake kernels for operators of its C++ extension. Where that does not load, they are
    declared here, never to be called.
    """
    if importlib.util.find_spec("torchvision") is None and _FOLDER.is_dir():
        sys.path.append(str(_FOLDER))
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        pytest.skip("torchvision is not installed", allow_module_level=True)
    if torch.version.cuda is None and not _declared and "torchvision" not in sys.modules:
        source = (Path(found.origin).parent / "_meta_registrations.py").read_text(encoding="utf-8")
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in dict.fromkeys(re.findall(r'register_(?:meta\(|fake\("torchvision::)"?(\w+)"', source)):
            library.define(f"{name}(Tensor x) -> Tensor")
        _declared.append(library)
    return importlib.import_module("torchvision")
