"""Agents on the nodes of a Ray cluster. Ray places, starts and ends them; samples come by TCP, as from any agent."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from minato_gpu.lanes.far import greeting
from minato_gpu.lanes.far.cluster import Lanes
from minato_gpu.sources import cluster_token
from minato_gpu.util.messages import from_extra
from minato_gpu.util.numbers import is_whole

_STARTS_S = 120.0


class RayLanes(Lanes):
    """Workers on other nodes of a Ray cluster, for ``DataLoader(cluster=...)``; needs the extra ``ray``.

    Ray starts actors of as many cores as the smallest node has, so that every node has room for one; each runs an agent
    as its child and ends it with itself. A node that dies is not replaced. The program has called ``ray.init``. Where
    MINATO_GPU_TOKEN is not set, the agents get a token of their own. Each loader's process has workers of its own: give
    each rank its share of ``cores``.

    Args:
        cores: workers on all nodes together, this one's left out. Each takes one of Ray's CPUs.
        resources: that each node must have and each actor takes, such as ``{"cpu_node": 1}``.
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
        self._actors: list[Any] = []

    def _addresses(self) -> list[str]:
        """Starts the agents, once. Raises AgentError where no nodes have so many cores, or they do not start."""
        if not self._actors:
            with from_extra("ray"):
                import ray
            if not ray.is_initialized():
                raise greeting.AgentError("RayLanes: call ray.init() first, which connects this program to its cluster")
            os.environ.setdefault(cluster_token.TOKEN, secrets.token_hex(32))
            self._names = self._start(ray)
        return self._names

    def _start(self, ray: Any) -> list[str]:
        own = ray.get_runtime_context().get_node_id()
        nodes = [each for each in ray.nodes() if each["Alive"] and each["NodeID"] != own]
        nodes = [each for each in nodes if all(each["Resources"].get(k, 0) >= v for k, v in self._resources.items())]
        sizes = sorted(int(each["Resources"].get("CPU", 0)) for each in nodes)
        if sum(sizes) < self._cores:
            raise greeting.AgentError(
                f"cores={self._cores}: {len(nodes)} other nodes of the Ray cluster have {sum(sizes)} in all"
                + (f" with {self._resources}" if self._resources else "")
            )
        size = next(each for each in sizes if each)  # of an actor: one that every node has room for
        starter = ray.remote(max_restarts=0, scheduling_strategy="SPREAD")(_Starter)
        elsewhere = {"ray.io/node-id": f"!{own}"}  # Ray knows which nodes have cores to spare
        for cores in [size] * (self._cores // size) + [self._cores % size] * (self._cores % size > 0):
            options = starter.options(num_cpus=cores, resources=self._resources, label_selector=elsewhere)
            self._actors.append(options.remote(cores, os.environ[cluster_token.TOKEN]))
        try:
            return list(ray.get([each.address.remote() for each in self._actors], timeout=_STARTS_S))
        except Exception as error:
            self._actors.clear()
            raise greeting.AgentError(f"the agents did not start on the nodes of the Ray cluster: {error}") from error


class _Starter:
    """An actor that has an agent as its child, which ends with it."""

    def __init__(self, cores: int, token: str) -> None:
        import ray

        host = ray.util.get_node_ip_address()
        command = [sys.executable, "-m", "minato_gpu", "lane", "--tied", "--listen", f"{host}:0", "--cores", str(cores)]
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, cluster_token.TOKEN: token, "PYTHONPATH": paths}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, **pipes)

    def address(self) -> str:
        """Where the agent listens."""
        assert self._process.stdout is not None
        said = self._process.stdout.readline().split()
        if not said:
            raise RuntimeError("the agent has ended before it listened; see this actor's log")
        return str(said[-1])
