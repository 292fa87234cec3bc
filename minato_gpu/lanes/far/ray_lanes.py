"""Agents on the nodes of a Ray cluster. Ray places, starts and ends them; samples come by TCP, as from any agent."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from minato_gpu.lanes.far import wire
from minato_gpu.lanes.far.cluster import Find, Lanes
from minato_gpu.sources import cluster_token
from minato_gpu.util.messages import LOGGER, from_extra
from minato_gpu.util.numbers import is_whole

_STARTS_S = 120.0
_ASKS_S = 0.2
_FEWEST = 4  # cores of an actor: each costs three processes there, and a thread and a connection here


class RayLanes(Lanes):
    """Workers on other nodes of a Ray cluster, for ``DataLoader(cluster=...)``; needs the extra ``ray``.

    Ray starts actors, each of which runs an agent as its child and ends it with itself. Cores are divided evenly among
    the nodes, so that no link and no loss of a node counts for more than its share; an actor has four or more of them
    where that many are asked for, and at most as many as the smallest node. Those for which there is no room wait for a
    node that joins; those of a node that dies wait for another. All end once this object and its loaders are gone. The
    program has called ``ray.init``. Where MINATO_GPU_TOKEN is not set, the agents get a token of their own. Each
    loader's process has workers of its own: give each rank its share of ``cores``.

    Args:
        cores: workers on all nodes together, this one's left out. Each takes one of Ray's CPUs.
        resources: that a node must have, such as ``{"cpu_node": 1}``; an actor takes a thousandth of one.
        node_budget: see ``Lanes``.

    Raises:
        ValueError, TypeError: no such number of cores, or of bytes.
    """

    def __init__(
        self, cores: int, *, resources: Mapping[str, float] | None = None, node_budget: int | str = "1GB"
    ) -> None:
        super().__init__("ray:1", node_budget=node_budget)
        if not is_whole(cores):
            raise TypeError(f"cores must be a whole number, got {cores!r}")
        if cores < 1:
            raise ValueError(f"cores must be at least 1, got {cores}; leave cluster out for this host's workers alone")
        self._cores, self._resources = cores, dict(resources or {})

    def _found(self) -> dict[str, tuple[Find, int]]:
        """Starts the agents, once. Raises AgentError where no node has cores, or none of the agents starts."""
        if not self._nodes:
            with from_extra("ray"):
                import ray
            if not ray.is_initialized():
                raise wire.AgentError("RayLanes: call ray.init() first, which connects this program to its cluster")
            os.environ.setdefault(cluster_token.TOKEN, secrets.token_hex(32))
            self._nodes = self._start(ray)
        return self._nodes

    def _start(self, ray: Any) -> dict[str, tuple[Find, int]]:
        own = ray.get_runtime_context().get_node_id()
        nodes = [each["Resources"] for each in ray.nodes() if each["Alive"] and each["NodeID"] != own]
        nodes = [each for each in nodes if all(each.get(name, 0) >= v for name, v in self._resources.items())]
        sizes = [int(each["CPU"]) for each in nodes if each.get("CPU", 0) >= 1]
        what = f"cores={self._cores}: {len(sizes)} other nodes of the Ray cluster have {sum(sizes)} in all" + (
            f" with {self._resources}" if self._resources else ""
        )
        if not sizes:
            raise wire.AgentError(what)
        if sum(sizes) < self._cores:
            LOGGER.warning("%s; the others are used when nodes join.", what)
        starter = ray.remote(max_restarts=-1, scheduling_strategy="SPREAD")(_Starter)
        resources = {name: min(v, 1e-3) for name, v in self._resources.items()}
        elsewhere = {"ray.io/node-id": f"!{own}"}  # Ray knows which nodes have cores to spare
        agents = []
        for cores in _shares(self._cores, sizes):
            options = starter.options(num_cpus=cores, resources=resources, label_selector=elsewhere)
            agents.append((_Agent(ray, options.remote(cores, os.environ[cluster_token.TOKEN])), cores))
        # not left to Ray, which ends an actor that nobody knows: errors may keep frames, and these an agent, for long
        end = weakref.finalize(self, _end, ray, [agent.actor for agent, _ in agents])
        end.atexit = False  # they end with the program
        try:
            first, _ = ray.wait([agent.asked for agent, _ in agents], timeout=_STARTS_S)
            ray.get(first)
            if not first:
                raise TimeoutError("none has told its address")
        except Exception as error:
            end()
            raise wire.AgentError(f"the agents did not start on the nodes of the Ray cluster: {error}") from error
        return {f"ray-{number}": (agent.find, cores) for number, (agent, cores) in enumerate(agents)}


def _shares(cores: int, sizes: Sequence[int]) -> list[int]:
    """Returns how many cores each actor has. ``sizes``: cores of the nodes that are there."""
    actors = max(min(len(sizes), cores // _FEWEST), -(-cores // min(sizes)))
    return [cores // actors + (number < cores % actors) for number in range(actors)]


def _end(ray: Any, actors: Sequence[Any]) -> None:
    """Ends actors, unless Ray has been shut down, which has ended them."""
    for actor in actors if ray.is_initialized() else ():
        ray.kill(actor)


class _Agent:
    """An agent's actor, which may not have been placed yet, or may have died."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self.actor = ray, actor
        self.asked: Any = actor.address.remote()  # the answer that is waited for; None: nobody has asked

    def find(self) -> str:
        """Returns the agent's address. Raises AgentError if there is none yet: without a text, or if Ray is down."""
        if not self._ray.is_initialized():  # to be asked it would begin a cluster of its own
            raise wire.AgentError("ray.shutdown() has been called")
        self.asked = self.asked or self.actor.address.remote()
        if not self._ray.wait([self.asked], timeout=_ASKS_S)[0]:
            raise wire.AgentError
        asked, self.asked = self.asked, None  # next time another one may run
        try:
            return str(self._ray.get(asked))
        except self._ray.exceptions.RayError:
            raise wire.AgentError from None


class _Starter:
    """An actor that has an agent as its child, which ends with it."""

    def __init__(self, cores: int, token: str) -> None:
        self._cores, self._token = cores, token
        self._process: subprocess.Popen[str] | None = None
        self._address = ""

    def address(self) -> str:
        """Returns the agent's address; starts the agent first if none runs."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._started()
            assert self._process.stdout is not None
            said = self._process.stdout.readline().split()
            if not said:
                raise RuntimeError("the agent has ended before it listened; see this actor's log")
            self._address = said[-1]
        return self._address

    def _started(self) -> subprocess.Popen[str]:
        import ray

        listen, cores = f"--listen={ray.util.get_node_ip_address()}:0", f"--cores={self._cores}"
        command = [sys.executable, "-m", "minato_gpu", "lane", "--tied", listen, cores]
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, cluster_token.TOKEN: self._token, "PYTHONPATH": paths}
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
