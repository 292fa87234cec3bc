"""What a loader's ``cluster`` names: agents by their addresses. Checked as the loader is made, opened as it starts."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from minato_gpu.arguments import Arguments
from minato_gpu.lanes.far import greeting
from minato_gpu.lanes.far.agent import Shipment
from minato_gpu.lanes.far.lane import FarLane
from minato_gpu.lanes.far.receiver import Receiver
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.sources import cluster_token
from minato_gpu.sources.peer_discovery import check_address, split_address
from minato_gpu.util.numbers import nbytes

_TRAVELS = ("dataset", "pipeline", "collate_fn", "worker_init_fn")
_MAIN = b"__main__"
Address = tuple[Any, Any]
"""A socket's family and address."""


class Lanes:
    """Workers of other machines, for ``DataLoader(cluster=...)``.

    Args:
        addresses: "host:port" of agents, each started there by ``minato-gpu lane --listen HOST:PORT``. Both sides need
            the same secret in the environment variable MINATO_GPU_TOKEN.
        node_budget: bytes of prepared samples that an agent may hold unsent before it lets its workers rest, a number
            or a text such as "1GB"; samples that are at work then come on top.

    Raises:
        ValueError, TypeError: an address is none.
    """

    def __init__(self, *addresses: str, node_budget: int | str = "1GB") -> None:
        if not addresses:
            raise ValueError('Lanes needs the address of at least one agent, such as Lanes("node1:7400")')
        for address in addresses:
            check_address(address, "an agent's address", "node1:7400")
        self._names = list(addresses)
        budget = (
            nbytes("node_budget", node_budget, "leave it out for 1GB") if isinstance(node_budget, str) else node_budget
        )
        if isinstance(budget, bool) or not isinstance(budget, int):
            raise TypeError(f'node_budget must be a number of bytes, or a text such as "1GB", got {node_budget!r}')
        if budget < 1:
            raise ValueError(f"node_budget must be at least 1, got {budget}; leave it out for 1GB")
        self._node_budget = budget
        self._nodes: dict[str, tuple[Address, int]] = {}  # by name; its workers

    @property
    def slots(self) -> int:
        """Workers of all agents together; 0 until they have been asked."""
        return sum(workers for _, workers in self._nodes.values())

    def check(self, loader: Arguments) -> None:
        """Asks every agent what it is, and finds out whether all that it needs can be sent.

        Raises ValueError or TypeError where an argument cannot, AgentError where an agent cannot do its work.
        """
        for name in _TRAVELS:
            try:
                with Path(os.devnull).open("wb") as nowhere:
                    pickle.dump(getattr(loader, name), nowhere, 5)
            except Exception as error:
                raise TypeError(
                    f"cluster: {name} cannot be sent to other machines, as it cannot be pickled "
                    f"({type(error).__name__}: {error}). Define its classes and functions at a module's top level, and "
                    "let it open files and locks where it is used"
                ) from error
        self._nodes = {name: _asked(name) for name in self._addresses()}

    def _addresses(self) -> list[str]:
        cluster_token.token()
        return self._names

    def open(self, job: Job, links: WorkerChannels) -> Iterator[FarLane]:
        """Opens the lanes of all agents, which are connected meanwhile; the job is pickled once."""
        data, receiver = pickle.dumps(job, 5), Receiver()
        main: dict[str, Any] = spawn.get_preparation_data("minato-agent")
        paths = tuple(main["sys_path"])
        needed = {name: main[name] for name in main if name.startswith("init_main")} if _MAIN in data else {}
        for name, (address, workers) in self._nodes.items():
            shipment = Shipment(data, paths, needed, self._node_budget, workers, f"cpu:{name}")
            yield FarLane(address, workers, shipment, links, receiver)


def _asked(name: str) -> tuple[Address, int]:
    """Where the agent is found, and how many workers it offers."""
    try:
        family, _, _, _, found = socket.getaddrinfo(*split_address(name), type=socket.SOCK_STREAM)[0]
        with closing(socket.socket(family, socket.SOCK_STREAM)) as end:
            end.settimeout(greeting.LIMIT_S)
            end.connect(found)
            hello = greeting.greet(end, name)
    except OSError as error:
        raise greeting.AgentError(
            f"no agent answers at {name} ({error}). Start one there with `minato-gpu lane --listen HOST:PORT`; without "
            "--listen it can be reached from its own machine alone"
        ) from error
    return (family, found), int(hello["cores"])
