"""The argument ``cluster`` of a loader: agents by their addresses.

It is checked as the loader is made; connections are opened as the workers start.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from minato_gpu.arguments import Arguments
from minato_gpu.lanes.far import wire
from minato_gpu.lanes.far.agent import Shipment
from minato_gpu.lanes.far.lane import FarLane
from minato_gpu.lanes.produce import Job
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.sources import cluster_token
from minato_gpu.sources.peer_discovery import check_address
from minato_gpu.util.messages import LOGGER
from minato_gpu.util.numbers import nbytes
from minato_gpu.util.threads import usable_cores

_TRAVELS = ("dataset", "pipeline", "collate_fn", "worker_init_fn")
_MAIN = b"__main__"
Find = Callable[[], str]
"""Returns an agent's address; AgentError where it has none yet."""


class Lanes:
    """Workers of other machines, for ``DataLoader(cluster=...)``.

    Args:
        addresses: "host:port" of agents, each started there by ``minato-gpu lane --listen HOST:PORT``. Both sides need
            the same secret in the environment variable MINATO_GPU_TOKEN.
        node_budget: bytes of samples that an agent may have begun and not sent, a number or a text such as "1GB"; a
            few samples for each of its workers are allowed in any case.

    Raises:
        ValueError, TypeError: there is no address, one is not of this form, or ``node_budget`` is no number of bytes.
    """

    def __init__(self, *addresses: str, node_budget: int | str = "1GB") -> None:
        if not addresses:
            raise ValueError('Lanes needs the address of at least one agent, such as Lanes("node1:7400")')
        for address in addresses:
            check_address(address, "an agent's address", "node1:7400")
        self._addresses = addresses
        self._node_budget = nbytes("node_budget", node_budget, "leave it out for 1GB")
        self._nodes: dict[str, tuple[Find, int]] = {}  # by name: what finds its agent, and its workers

    @property
    def slots(self) -> int:
        """Workers of all agents together, 0 before ``check``; an agent that did not answer it counts as many as there
        are cores here."""
        return sum(workers for _, workers in self._nodes.values())

    def check(self, loader: Arguments) -> None:
        """Asks every agent what it offers, and checks that the loader's data set and functions can be sent.

        Raises TypeError if one cannot, ValueError without a token, AgentError if an agent cannot do the loader's work.
        An agent that does not answer may come later.
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
        self._nodes = self._found()

    def _found(self) -> dict[str, tuple[Find, int]]:
        cluster_token.token()
        return {address: (partial(str, address), _workers(address)) for address in self._addresses}

    def open(self, job: Job, links: WorkerChannels) -> Iterator[FarLane]:
        """Opens the lanes of all agents that ``check`` has asked; each connects by itself. The job is pickled once."""
        data = pickle.dumps(job, 5)
        main: dict[str, Any] = spawn.get_preparation_data("minato-agent")
        paths = tuple(main["sys_path"])
        needed = {name: main[name] for name in main if name.startswith("init_main")} if _MAIN in data else {}
        for name, (find, workers) in self._nodes.items():
            yield FarLane(find, Shipment(data, paths, needed, self._node_budget, workers, f"cpu:{name}"), links)


def _workers(address: str) -> int:
    """Returns how many workers the agent offers, or a guess where it does not answer."""
    try:
        connected, hello = wire.reach(address)
    except OSError as error:
        LOGGER.warning(
            "No agent answers at %s (%s): it is tried again every second. Start one there with `minato-gpu lane "
            "--listen HOST:PORT`; without --listen it can be reached from its own machine alone.",
            address,
            str(error),  # whoever keeps the record is not to keep the frames
        )
        return usable_cores()
    connected.close()
    return int(hello["cores"])
