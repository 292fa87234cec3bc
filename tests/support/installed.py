"""What a bare environment runs with the wheel installed and nothing of a clone at hand (``make test-wheel``)."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import minato_gpu

_HEAVY = ("torch", "fsspec", "psutil")
IMPORTED = sorted(name for name in sys.modules if name.startswith("minato_gpu.") or name in _HEAVY)


class Numbers:
    """A data set of 32 samples with one field."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, key: int) -> dict[str, int]:
        return {"number": key}


def squared(fields: Any, _: Any) -> Any:
    """Squares the field."""
    return {"square": fields["number"] ** 2}


def main() -> None:
    """Loads without workers and with those of each start method, and runs the command line."""
    assert not IMPORTED, f"import minato_gpu imports {IMPORTED}"
    assert "site-packages" in minato_gpu.__file__ and version("minato-gpu") == minato_gpu.__version__
    assert Path(minato_gpu.__file__).with_name("py.typed").exists()
    stage = minato_gpu.Stage("square", ("number",), {"square": minato_gpu.Field("int64", ())}, squared)
    pipeline = minato_gpu.Pipeline((stage,), outputs=("square",))
    for method in (None, "fork", "forkserver", "spawn"):
        workers: dict[str, Any] = {} if method is None else {"num_workers": 2, "multiprocessing_context": method}
        data: Any = Numbers()
        loader: Any = minato_gpu.DataLoader(data, 8, pipeline=pipeline, **workers)
        found = [int(number) for batch in loader for number in batch["square"]]
        assert found == [number**2 for number in range(32)], (method, found)
    command = Path(sys.executable).with_name("minato-gpu")
    said = subprocess.run([command, "--help"], check=True, capture_output=True, text=True).stdout
    assert "check" in said and "demo" in said, said
    sys.stdout.write(f"minato-gpu {minato_gpu.__version__} works with Python {sys.version.partition(' ')[0]}\n")


if __name__ == "__main__":
    main()
