"""Workers that are not forked from the training process: what they are given is pickled once, and all of it comes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from tests.support.leaks import open_links


class Holder:
    """Holds what needs descriptors, and says how often it was pickled and where it was made anew."""

    pickled = 0
    is_first = True

    def __init__(self, context: Any, workers: int) -> None:
        self.shared = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.lock, self.queue, self.paths = context.Lock(), context.Queue(), [str(at) for at in range(50_000)]
        self.pid, self.all_at_work = -1, context.Barrier(workers)

    def __getstate__(self) -> dict[str, Any]:
        Holder.pickled += 1
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, pid=os.getpid(), is_first=True)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, key: int) -> Any:
        if self.is_first:  # else one worker might prepare all
            self.is_first = False
            self.all_at_work.wait(60.0)
        with self.lock:
            self.shared += 1
        self.queue.put(self.paths[key])
        return torch.tensor([key, int(self.pid == os.getpid())])


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_pickled_once_and_each_worker_has_its_own(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    data, Holder.pickled = Holder(context, 2), 0
    loader: Any = DataLoader(data, 4, num_workers=2, multiprocessing_context=context)  # type: ignore[arg-type]
    batches = iter(loader)
    found = torch.cat([next(batches) for _ in range(6)])
    assert {data.queue.get() for _ in range(24)} == {str(key) for key in range(24)}  # before slow workers are killed
    assert next(batches, None) is None and found.tolist() == [[key, 1] for key in range(24)]
    assert (Holder.pickled, int(data.shared)) == (1, 24)
    assert not [link for link in open_links() if "minato-job" in link]


class Deadly(Holder):
    """The first try at a sample ends the worker."""

    def __getitem__(self, key: int) -> Any:
        with self.lock:
            self.shared += 1
            first = int(self.shared) == 1
        if first:
            os._exit(1)
        return super().__getitem__(key)


def test_a_replacement_gets_it_too() -> None:
    context: Any = multiprocessing.get_context("forkserver")
    more: Any = {"multiprocessing_context": context, "on_worker_death": "replace"}
    loader: Any = DataLoader(Deadly(context, 1), 4, num_workers=1, **more)  # type: ignore[arg-type]
    assert torch.cat(list(loader)).tolist() == [[key, 1] for key in range(24)]
    assert loader.stats()["workers"]["replaced"] == 1


PROGRAM = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import where  # tells where it was imported

class Data:
    def __len__(self):
        return 8
    def __getitem__(self, key):
        return where.PID, os.getpid()

if __name__ == "__main__":
    from minato_gpu import DataLoader
    batches = list(DataLoader(Data(), 1, num_workers=2, multiprocessing_context="forkserver"))
    imported, workers = ({int(batch[at]) for batch in batches} for at in (0, 1))
    assert len(imported) == 1 and not imported & {os.getpid(), *workers}, (imported, workers)
    print("imported by the server")
"""


def test_a_fork_server_imports_what_workers_need(tmp_path: Path) -> None:
    """A program of its own: the server is made once for each."""
    (tmp_path / "where.py").write_text("import os\nPID = os.getpid()\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("imported by the server\n", 0), done.stderr
