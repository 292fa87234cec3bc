"""Ranks of a large training with workers of other machines, under a virtual clock (``minato-gpu simulate cluster``).

16 hosts with 8 GPUs and 128 cores each, and 100 hosts of 128 cores without one. Each GPU's rank has a loader of its
own: the production scheduler, with an eighth of its host's cores as workers, and 100 of the other hosts' cores. Samples
take 250 ms on average and are 1.5 MB large. What comes from another host passes its link and the link of the rank's
host, in the order in which it is ready. ``nodes``: over how many hosts a rank's 100 far workers are spread. Hosts
that leave do so in mid-epoch, and are noticed after a second of silence.

The bound is the rate of all cores that are there, as far as links carry what they make; with that, an epoch could not
be shorter whatever decides. The last rank to end decides how long it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from minato_gpu.lab.simulation.virtual_loader import FarNode, VirtualLoader, run_together
from minato_gpu.lab.simulation.work import Work
from minato_gpu.samples import JSON
from minato_gpu.scheduling.policy import Policy

MEAN_S, NBYTES, BATCH, WINDOW = 0.25, 1_500_000, 32, 512
DESCRIPTION = "16 hosts of 8 GPUs and 128 cores with 100 CPU hosts: links of 25 and 100 Gbit/s, hosts that leave"


@dataclass(frozen=True)
class Cluster:
    """The machines. ``nodes``: CPU hosts over which a rank's far workers are spread; ``leaving``: how many leave."""

    gbit_s: float
    nodes: int
    leaving: int = 0
    hosts: int = 16
    gpus: int = 8
    cores: int = 128
    cpu_hosts: int = 100
    samples: int = 1280  # of each rank

    @property
    def ranks(self) -> int:
        return self.hosts * self.gpus

    @property
    def far(self) -> int:
        """Cores of CPU hosts that each rank has."""
        return self.cpu_hosts * self.cores // self.ranks

    @property
    def leaves_at(self) -> float:
        """The time at which hosts leave: the middle of the least possible epoch, in seconds."""
        return 0.5 * self.samples * self.ranks / self._rate(self.cpu_hosts)

    def bound_s(self) -> float:
        """Seconds that all samples take at least."""
        done, left = self.leaves_at if self.leaving else 0.0, self.cpu_hosts - self.leaving
        return done + (self.samples * self.ranks - done * self._rate(self.cpu_hosts)) / self._rate(left)

    def _rate(self, cpu_hosts: int) -> float:
        carried = self.hosts * self.gbit_s * 1e9 / 8 / NBYTES
        return self.hosts * self.cores / MEAN_S + min(cpu_hosts * self.cores / MEAN_S, carried)


class _Links:
    """The links of all hosts, each of which sends or receives one thing after another."""

    def __init__(self, cluster: Cluster) -> None:
        self._seconds = NBYTES * 8 / (cluster.gbit_s * 1e9)  # of a sample
        self._out, self._into = [0.0] * cluster.cpu_hosts, [0.0] * cluster.hosts

    def arrival(self, node: int, host: int, now: float, samples: int) -> float:
        """Returns when samples that are ready at ``now`` on CPU host ``node`` have come to ``host``, in seconds."""
        seconds = samples * self._seconds
        self._out[node] = sent = max(now, self._out[node]) + seconds
        self._into[host] = max(sent - seconds, self._into[host]) + seconds
        return self._into[host]


def simulate(cluster: Cluster, seed: int = 0) -> tuple[list[float], float]:
    """Returns how long each rank takes for its samples, and the bound, in seconds."""
    links, ranks = _Links(cluster), list[VirtualLoader]()
    policy = Policy(window=WINDOW)
    for rank in range(cluster.ranks):
        costs = MEAN_S * np.random.default_rng([seed, rank]).gamma(4.0, 0.25, cluster.samples)
        told = np.full(cluster.samples, MEAN_S)
        work = Work(costs, told, BATCH, (cluster.samples,), cluster.cores // cluster.gpus)
        far: dict[str, FarNode] = {}
        for at in range(cluster.nodes):
            node = (rank * cluster.cpu_hosts // cluster.ranks + at) % cluster.cpu_hosts
            slots = (at + 1) * cluster.far // cluster.nodes - at * cluster.far // cluster.nodes
            arrival = partial(links.arrival, node, rank // cluster.gpus)
            far[f"cpu:{node}"] = FarNode(slots, arrival, cluster.leaves_at if node < cluster.leaving else np.inf)
        ranks.append(VirtualLoader(work, policy, far=far))
    return [outcome.makespan_s for outcome in run_together(ranks)], cluster.bound_s()


def run() -> list[dict[str, JSON]]:
    """Returns a row for each link, spread and number of hosts that leave.

    ``of_bound``: the bound divided by the time of the last rank; ``fairness``: the slowest rank's rate divided by the
    mean rate; ``later_s``: by how many seconds it takes longer than where no host leaves.
    """
    rows: list[dict[str, JSON]] = []
    for gbit_s in (25.0, 100.0):
        for nodes in (1, 20):
            stays = 0.0
            for leaving in (0, 1):
                cluster = Cluster(gbit_s, nodes, leaving)
                seconds, bound = simulate(cluster)
                stays = stays or max(seconds)
                rates = cluster.samples / np.array(seconds)
                row: dict[str, JSON] = {"gbit_s": gbit_s, "nodes": nodes, "leaving": leaving}
                row["samples_per_s"] = cluster.samples * cluster.ranks / max(seconds)
                row["of_bound"], row["fairness"] = bound / max(seconds), float(rates.min() / rates.mean())
                rows.append(row | {"later_s": max(seconds) - stays})
    return rows
