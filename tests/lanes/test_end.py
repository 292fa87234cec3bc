"""How long a worker that is at a sample may go on after its loader's end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from minato_gpu import DataLoader


class Writes:
    """The second sample begins a file, and ends it three seconds later."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 2

    def __getitem__(self, key: int) -> int:
        if key:
            self.path.write_text("begun")
            time.sleep(3.0)
            self.path.write_text("whole")
        return key


def test_a_file_is_written_to_its_end(tmp_path: Path) -> None:
    """PyTorch waits for five seconds."""
    data: Any = Writes(tmp_path / "file")
    batches = iter(DataLoader(data, num_workers=1))
    assert int(next(batches)) == 0
    while not data.path.exists() or not data.path.read_text():
        time.sleep(0.01)
    del batches
    assert data.path.read_text() == "whole"
