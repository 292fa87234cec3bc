"""Does ``minato-gpu analyze`` find a planted cause? Twelve training scripts, each held up by something else.

Each script runs under the command as a user's would, and its verdict is compared with what was planted. What a sample
costs is fixed work, measured as the script begins; what a step or storage takes is waited. Slow storage is a data set
that waits, for files that the page cache does not have, for a latency and for its turn at a rate (a token bucket that
all workers share). What needs a GPU (transfer-bound) is not among them.

    right      whether the verdict names what was planted
    gain       the share of the epoch that it promises, at most
    seconds    that the analysis took, its start included
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import click

from benchmarks import report

HEAD = '''
import os, sys, time, multiprocessing
import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler
import minato_gpu
from minato_gpu.sources.disk.filesystem import cached_bytes

torch.set_num_threads(1)
FOLDER = sys.argv[1]
ROW = np.random.default_rng(0).random(100_000)


def sorted_in(numbers):
    """Seconds."""
    begin = time.perf_counter()
    np.sort(ROW[:numbers], kind="stable")
    return time.perf_counter() - begin


# what is planted holds on any machine: a sort takes a millisecond on this one
ROW = ROW[: round(20_000 * 1e-3 / np.median([sorted_in(20_000) for _ in range(50)]))]


def work(times):
    """Fixed work: so many sorts, of a millisecond each."""
    for _ in range(times):
        np.sort(ROW, kind="stable")


def spin(times):
    """Fixed work that holds Python's lock."""
    total = 0
    for number in range(times * 10_000):
        total += number
    return total


class Data:
    def __init__(self, times=0, slow=0, latency_s=0.0, rate=None, width=100, parts=0):
        self.paths = sorted(os.path.join(FOLDER, name) for name in os.listdir(FOLDER))
        self.times, self.slow, self.latency_s, self.rate = times, slow, latency_s, rate
        self.width, self.parts = width, parts
        self.free_at = multiprocessing.get_context("fork").Value("d", 0.0)

    def __len__(self):
        return len(self.paths)

    def read(self, path):
        file = os.open(path, os.O_RDONLY)
        size = os.fstat(file).st_size
        if (self.latency_s or self.rate) and (cached_bytes(file) or 0) < size:
            time.sleep(self.latency_s)
            if self.rate:
                with self.free_at.get_lock():
                    self.free_at.value = max(self.free_at.value, time.monotonic()) + size / self.rate
                    until = self.free_at.value
                time.sleep(max(0.0, until - time.monotonic()))
        data = os.read(file, size)
        os.close(file)
        return data

    def __getitem__(self, index):
        data = np.frombuffer(self.read(self.paths[index]), np.uint8)
        work(self.slow if self.slow and index % 100 == 50 else self.times)
        row = torch.from_numpy(data[: self.width].astype(np.float32))
        return [row[number % 50 :][:2].clone() for number in range(self.parts)] if self.parts else row


def train(loader, step_s):
    while True:
        for batch in loader:
            time.sleep(step_s)


'''


class Planted(NamedTuple):
    """``case``: the verdict that is right. ``body``: of the script. ``ranks``: processes of the job."""

    case: str
    body: str
    ranks: int = 1


PLANTED = {
    "step-bound": Planted("step-bound", "train(DataLoader(Data(2), 8, shuffle=True, num_workers=2), 0.05)"),
    "one worker of two": Planted(
        "too few workers", "train(DataLoader(Data(5), 8, shuffle=True, num_workers=1), 0.025)"
    ),
    "too few cores": Planted("too few cores", "train(DataLoader(Data(10), 8, shuffle=True, num_workers=2), 0.005)"),
    "no workers": Planted("no workers", "train(DataLoader(Data(4), 8, shuffle=True), 0.04)"),
    "slow disk": Planted("slow storage", "train(DataLoader(Data(1, rate=2e6), 8, shuffle=True, num_workers=2), 0.02)"),
    "far storage": Planted(
        "storage latency", "train(DataLoader(Data(1, latency_s=0.03), 8, shuffle=True, num_workers=2), 0.02)"
    ),
    "one slow sample in a hundred": Planted(
        "few slow samples", "train(DataLoader(Data(1, slow=400), 8, shuffle=True, num_workers=2), 0.04)"
    ),
    "one batch ahead": Planted(
        "too few batches in flight",
        """
class Uneven(Data):
    def __getitem__(self, index):
        work(14 if index // 8 % 4 == 0 else 3)  # every fourth batch is dear
        return super().__getitem__(index)
train(DataLoader(Uneven(1), 8, num_workers=1, prefetch_factor=1), 0.065)
""",
    ),
    "slow collate": Planted(
        "collate-bound",
        """
def collate(samples):
    work(40)
    return torch.stack(samples)
train(DataLoader(Data(2), 8, shuffle=True, num_workers=1, collate_fn=collate), 0.015)
""",
    ),
    "collate that holds the lock": Planted(
        "one lock",
        """
def collate(samples):
    spin(100)
    return torch.stack(samples)
train(minato_gpu.DataLoader(Data(1), 8, shuffle=True, num_workers=2, collate_fn=collate, worker_kind="thread"), 0.01)
""",
    ),
    "thousands of tensors": Planted(
        "loader-bound", "train(DataLoader(Data(parts=400), 8, shuffle=True, num_workers=2), 0.002)"
    ),
    "a slow rank": Planted(
        "slow rank",
        """
import torch.distributed as dist
dist.init_process_group("gloo")
data = Data(6 if dist.get_rank() == 1 else 1)
loader = DataLoader(data, 8, sampler=DistributedSampler(data), num_workers=1)
value = torch.ones(1)
while True:
    for batch in loader:
        time.sleep(0.02)
        dist.all_reduce(value)
""",
        ranks=2,
    ),
}


def files(folder: Path, count: int, nbytes: int) -> Path:
    """A folder of files of random bytes."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:05}.bin").write_bytes(os.urandom(nbytes))
    return folder


def found_by_analysis(planted: Planted, data: Path, folder: Path, seconds: float) -> dict[str, Any]:
    """The document that the command leaves."""
    script, left = folder / "train.py", folder / "out.json"
    left.unlink(missing_ok=True)
    script.write_text(HEAD + planted.body, encoding="utf-8")
    python = [sys.executable, "-m"]
    if planted.ranks > 1:
        python += ["torch.distributed.run", "--nproc-per-node", str(planted.ranks), "-m"]
    command = [*python, "minato_gpu", "analyze", "--seconds", str(seconds), "--json", str(left), str(script), str(data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    document: dict[str, Any] | None = json.loads(left.read_text(encoding="utf-8")) if left.exists() else None
    # it exits with 1 where too few batches were seen, too: a verdict like others
    if document is None or (done.returncode and document["verdict"]["case"] != "unknown"):
        raise click.ClickException(f"{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return document


def row(name: str, data: Path, folder: Path, seconds: float) -> dict[str, Any]:
    """What the analysis says of one of the cases."""
    begin = perf_counter()
    document = found_by_analysis(PLANTED[name], data, folder, seconds)
    verdict = document["verdict"]
    report.progress(f"{name}: {verdict['case']}: {verdict['sentence']}")
    return {
        "planted": name,
        "expected": PLANTED[name].case,
        "verdict": verdict["case"],
        "right": verdict["case"] == PLANTED[name].case,
        "gain": verdict["gain"],
        "seconds": perf_counter() - begin,
        "sentence": verdict["sentence"],
        "profile": document["profiles"][0],
    }


@report.benchmark("verdicts", 1, shown=("planted", "expected", "verdict", "right", "gain", "seconds", "sentence"))
@click.option("--case", "names", multiple=True, type=click.Choice(list(PLANTED)), help="Only these.")
@click.option("--seconds", type=click.FloatRange(min=1), default=20.0, help="Of each analysis.")
def main(quick: bool, repetitions: int, names: tuple[str, ...], seconds: float) -> Iterator[dict[str, Any]]:
    seconds, names, count = (1.0, names[:1], 300) if quick else (seconds, names, 3000)
    runs = Path("runs")  # on a disk, which the folder of temporary files may not be
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="verdicts_", dir=runs.resolve()) as place:
        data = files(Path(place) / "data", count, 20_000)
        for name in repetitions * (names or tuple(PLANTED)):
            found = row(name, data, Path(place), seconds)
            wrong = {} if quick or found["right"] else {"error": "the verdict is wrong"}
            yield found | wrong


if __name__ == "__main__":
    main()
