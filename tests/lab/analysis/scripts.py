"""Training scripts of the tests: what is the user's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from minato_gpu.lab.analysis.script import ScriptOrder
from tests.support.programs import Program

HEAD = """
import sys, os
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
import minato_gpu


class Files(Dataset):
    def __init__(self, folder):
        self.paths = sorted(os.path.join(folder, name) for name in os.listdir(folder))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        data = np.fromfile(self.paths[index], np.uint8)
        return torch.from_numpy(data[:100].astype(np.float32))


def train(loader, epochs=1, weight=torch.ones(100, requires_grad=True)):
    given = []
    for epoch in range(epochs):
        for batch in loader:
            (batch @ weight).sum().backward()
            given.append(len(batch))
            batch.zero_()  # in place: the next one must not be
    return given

"""


FEW_BATCHES = """
from minato_gpu.lab.analysis import standalone
standalone._MOST = 100  # that are prepared by themselves, where time would suffice for many more
"""

SET_CLOCK = """
from functools import partial
from itertools import count
from minato_gpu.lab.analysis import conductor
moments = count()
conductor.Conductor = partial(conductor.Conductor, clock=lambda: 1e-3 * next(moments))  # each look at it takes time
"""


def written(folder: Path, body: str) -> str:
    """A script with this body, after the head; returns its path."""
    path = folder / "train.py"
    path.write_text(HEAD + body, encoding="utf-8")
    return str(path)


def data(folder: Path, count: int = 64) -> str:
    """A folder of that many files, of 2000 bytes each."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:03}.bin").write_bytes(bytes([number % 251]) * 2000)
    return str(folder)


class Forked(Program):
    """A script's process in place of that which ``script.started`` starts: one that need not import torch."""

    def __init__(self, order: ScriptOrder) -> None:
        super().__init__("minato_gpu.lab.analysis.child", order.text(), at_once=True)

    def wait(self, timeout: float | None = None) -> int | None:
        if self._ended(None if timeout is None else int(timeout * 1000)) is None:
            raise subprocess.TimeoutExpired("a script", timeout or 0.0)
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)
