"""Jobs of one host that prepare each sample once, to which anything may happen: ``make chaos NODE=1 SEEDS=20 SEED=1``.

Each seed starts three jobs with one ``share``. Meanwhile jobs, workers and the reader process are killed, or stopped
for a while, jobs come back, and noise is sent. Every batch of every job must be what a loader alone delivers, and in
the end the reader process must go.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import random
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.queues import Queue
from typing import Any

import click
import psutil
import torch

from benchmarks import report
from minato_gpu import DataLoader
from minato_gpu.memory.private_folder import PrivateFolder
from minato_gpu.sources import host_reader, sent_samples
from minato_gpu.sources.host_reader import name_of
from minato_gpu.sources.process import ReaderSettings
from tests.support.waiting import wait_until

JOBS, SAMPLES, BATCH, EPOCHS = 3, 160, 8, 3
SHARE = "chaos"
_HANGS_S = 120.0
_context: Any = multiprocessing.get_context("fork")


class Computed:
    """Samples that take some milliseconds, draw, and are of different sizes."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, key: int) -> Any:
        end = time.thread_time() + 3e-3
        while time.thread_time() < end:
            hashlib.blake2b(bytes(2000)).digest()
        return {"key": key, "drawn": torch.rand(20_000), "more": torch.rand(key * 50 % 7_000), "name": f"sample {key}"}


def stacked(samples: list[Any]) -> list[Any]:
    """A batch of samples of different sizes."""
    return samples


def digests(epochs: int = EPOCHS, **more: Any) -> Any:
    """What each batch holds, and the loader when all have come."""
    data: Any = Computed()
    more |= {"generator": torch.Generator().manual_seed(0), "on_worker_death": "replace", "collate_fn": stacked}
    loader: Any = DataLoader(data, BATCH, shuffle=True, num_workers=2, **more)
    found = []
    for _ in range(epochs):
        for batch in loader:
            each = hashlib.blake2b(digest_size=8)
            for sample in batch:
                each.update(f"{sample['key']} {sample['name']}".encode())
                each.update(sample["drawn"].numpy().data)
                each.update(sample["more"].numpy().data)
            found.append(each.hexdigest())
    return found, loader


def _job(wanted: list[str], found: Queue[Any]) -> None:
    torch.set_num_threads(1)
    got, loader = digests(share=SHARE, share_budget="3MB")
    found.put((got == wanted, loader.stats().get("share", {}).get("copied", 0)))
    del loader


class Host:
    """Jobs at work, and what may happen to them."""

    def __init__(self, wanted: list[str], chance: random.Random, counts: Counter[str]) -> None:
        self.wanted, self.chance, self.counts = wanted, chance, counts
        self.found: Queue[Any] = _context.Queue()
        self.jobs = [self._start() for _ in range(JOBS)]
        self.happens: list[Callable[[], None]] = [self.kill_job, self.kill_worker, self.kill_reader, self.noise]
        self.happens += [self.stop] * 4

    def _start(self) -> Any:
        job = _context.Process(target=_job, args=(self.wanted, self.found))
        job.start()
        return job

    def readers(self) -> list[psutil.Process]:
        """The reader process, as it says itself."""
        own = PrivateFolder()
        try:
            with own.connect(name_of(SHARE), 1.0, socket.SOCK_SEQPACKET) as end:
                end.send(pickle.dumps(ReaderSettings()))
                return [psutil.Process(pickle.loads(end.recv(1000)).pid)]
        except (OSError, EOFError, psutil.Error):
            return []
        finally:
            own.close()

    def workers(self) -> list[psutil.Process]:
        """Those of all jobs."""
        found = []
        for job in self.jobs:
            with suppress(psutil.Error):
                children = psutil.Process(job.pid).children(recursive=True)
                found += [each for each in children if each.name().startswith("minato-work")]
        return found

    def kill_job(self) -> None:
        """One is killed, and comes back."""
        at = self.chance.randrange(JOBS)
        if self.jobs[at].is_alive():
            self.jobs[at].kill()
            self.jobs[at].join()
            self.jobs[at] = self._start()

    def kill_worker(self) -> None:
        """Its job starts another."""
        for worker in self.chance.sample(workers := self.workers(), min(1, len(workers))):
            worker.kill()

    def kill_reader(self) -> None:
        """Its jobs go on alone, until they start workers anew."""
        for reader in self.readers():
            reader.kill()

    def stop(self) -> None:
        """Anything is stopped for a while: a job, a worker or the reader process."""
        jobs = [psutil.Process(job.pid) for job in self.jobs if job.is_alive()]
        any_of = [*jobs, *self.workers(), *self.readers()]
        for each in self.chance.sample(any_of, min(1, len(any_of))):
            with suppress(psutil.Error):
                each.suspend()
                time.sleep(self.chance.choice([0.1, 1.0, 3.0]))
                each.resume()

    def noise(self) -> None:
        """Somebody of this user says what no loader says."""
        own = PrivateFolder()
        theirs, ours = sent_samples.pair()
        try:
            with own.connect(name_of(SHARE), 1.0, socket.SOCK_SEQPACKET) as end, theirs, ours:
                if self.chance.random() < 0.7:
                    socket.send_fds(end, [pickle.dumps(ReaderSettings(share_bytes=1))], [theirs.fileno()])
                for to in self.chance.sample([end, ours], 2):
                    to.send(self.chance.randbytes(self.chance.choice([5, 40, 200])))
        except OSError:  # there is none, or it has left
            pass
        finally:
            own.close()

    def run(self) -> None:
        """Something happens now and then until all jobs have read all."""
        done, end = 0, time.monotonic() + _HANGS_S
        while done < JOBS:
            if time.monotonic() > end:
                raise AssertionError("a job hangs")
            time.sleep(0.3 * self.chance.random())
            if time.monotonic() < end - 0.75 * _HANGS_S:
                happens = self.chance.choice(self.happens)
                with suppress(psutil.Error):
                    happens()
                self.counts[happens.__name__] += 1
            while not self.found.empty():
                is_right, copied = self.found.get()
                if not is_right:
                    raise AssertionError("a job has other batches than a loader alone")
                done += 1
                self.counts["samples copied"] += copied
        for job in self.jobs:
            job.join(_HANGS_S)
            if job.exitcode != 0:
                raise AssertionError(f"a job has ended with {job.exitcode}")

    def close(self) -> None:
        """Nothing stays of what has failed."""
        for job in self.jobs:
            job.kill()
            job.join()


def run(wanted: list[str], seed: int, counts: Counter[str]) -> None:
    """Everything of one seed, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        host = Host(wanted, random.Random(seed), counts)
        try:
            host.run()
        finally:
            host.close()
        readers = host.readers()
        if not wait_until(lambda: not any(reader.is_running() for reader in readers)):
            raise AssertionError("the reader process stays")


@click.command(help=__doc__)
@click.option("--seeds", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--seed", "first", type=click.IntRange(min=0), help="The first one; a random one if not given.")
def main(seeds: int, first: int | None) -> None:
    torch.set_num_threads(1)
    host_reader.LINGER_S = 1.0
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    first = random.SystemRandom().randrange(1 << 32) if first is None else first
    (wanted, _), counts = digests(), Counter[str]()
    for seed in range(first, first + seeds):
        begin = time.monotonic()
        try:
            run(wanted, seed, counts)
        except AssertionError as error:
            click.echo(f"seed {seed}: {error}")
            raise SystemExit(1) from error
        report.progress(f"seed {seed}: {time.monotonic() - begin:.1f} s, {dict(counts)}")


if __name__ == "__main__":
    main()
