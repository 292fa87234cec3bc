"""Python runs this as it starts, where ``python -m tests.fake_cuda`` has put this folder into PYTHONPATH."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))
from tests.fake_cuda import imports

sys.path.pop()
imports.install()
