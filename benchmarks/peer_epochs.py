"""Epochs of several hosts whose caches are one (``cache_peers``): what they still read from storage, and from others.

Each host is a process of this machine with a reader process of its own, and shares the samples of each epoch out with
the others (``DistributedSampler``). Objects lie behind a server that counts what it sends (``benchmarks.throttle``).
``room``: the share of the set that each host's cache may keep (CoorDL's servers had 0.65). In one case a host and its
reader process are killed after the third epoch, and the others go on.

    times_read    bytes that the server has sent in the epoch, as a multiple of the set's
    remote        share of the samples whose bytes another host has sent
    expected      that share where each sample is as likely to be any host's: (hosts - 1) / hosts
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

from torch.utils.data import DistributedSampler, Subset

from benchmarks import report
from benchmarks.isolate import FORK, isolated
from benchmarks.storage import NBYTES, Declared
from benchmarks.throttle import Throttle, served, server
from benchmarks.turns import select
from minato_gpu import DataLoader
from minato_gpu.sources.blocks import space_of
from minato_gpu.sources.cluster_token import TOKEN
from minato_gpu.sources.peer_discovery import ADDRESS

BATCH, EPOCHS, LEAVES_AFTER = 16, 5, 3


class Case(NamedTuple):
    """So many hosts, each with room for that share of the set; ``leaves``: one of them does."""

    name: str
    hosts: int
    room: float
    leaves: bool = False


CASES = (
    Case("2 hosts, room for 65 % each", 2, 0.65),
    Case("4 hosts, room for 40 % each, one leaves", 4, 0.4, leaves=True),
)


def _host(case: Case, rank: int, data: Any, addresses: list[str], barrier: Barrier, found: Queue[Any]) -> None:
    os.environ[ADDRESS] = addresses[rank]
    room = round(case.room * len(data) * space_of(NBYTES))
    shared: dict[str, Any] = {"share": addresses[rank].replace(":", " "), "cache": room, "cache_peers": addresses}

    def loader(samples: Any, hosts: int) -> Any:
        sampler: Any = DistributedSampler(samples, hosts, rank)
        return DataLoader(samples, BATCH, sampler=sampler, num_workers=1, **shared)

    first = loader(Subset(data, range(case.hosts)), case.hosts)  # whose reader process stays
    met = False
    while not met:
        list(first)
        met = first.stats()["reads"]["peers"]["why"] == ""
    for epoch in range(1, EPOCHS + 1):
        left = case.leaves and epoch > LEAVES_AFTER
        barrier.wait()
        if left and rank == case.hosts - 1:
            if epoch == LEAVES_AFTER + 1:
                os.kill(first._session.readers._reader.pid, signal.SIGKILL)
        else:
            whole = loader(data, case.hosts - left)
            whole.sampler.set_epoch(epoch)
            found.put((sum(len(batch) for batch in whole), whole.stats()["reads"]["from_peers"]))
        barrier.wait()


def run(case: Case, samples: int) -> list[dict[str, Any]]:
    """A row for each epoch."""
    os.environ[TOKEN] = secrets.token_hex(16)
    rows: list[dict[str, Any]] = []
    with server(Throttle(1.0), NBYTES) as address, ExitStack() as undo:
        ends = [undo.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(case.hosts)]
        addresses = [f"127.0.0.1:{end.getsockname()[1]}" for end in ends]  # of free ports
        undo.close()
        barrier, found = FORK.Barrier(case.hosts + 1), FORK.Queue()
        for rank in range(case.hosts):
            arguments = (case, rank, Declared(address, 0.0, samples), addresses, barrier, found)
            FORK.Process(target=_host, args=arguments).start()
        for epoch in range(1, EPOCHS + 1):
            hosts = case.hosts - (case.leaves and epoch > LEAVES_AFTER)
            barrier.wait()
            before = served(address)
            counts = [found.get(timeout=60.0) for _ in range(hosts)]
            barrier.wait()
            read, remote = (sum(column) / samples for column in zip(*counts, strict=True))
            if not 0 <= read - 1 < hosts / samples:
                raise AssertionError(f"{read * samples:.0f} samples in place of {samples}")
            times_read = (served(address) - before) / samples / NBYTES
            rows.append({"epoch": epoch, "hosts": hosts, "times_read": times_read, "remote": remote / read})
            rows[-1]["expected"] = (hosts - 1) / hosts
    return rows


@report.benchmark("peer_epochs", 1)
@report.case_option
def main(quick: bool, repetitions: int, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for case in select("case", CASES, names):
        for repetition in range(repetitions):
            for row in isolated(run, case, 100 if quick else 2400, timeout_s=300):
                yield {"case": case.name, "repetition": repetition, **row}


if __name__ == "__main__":
    main()
