"""Ranks with workers of other machines, under a virtual clock: no better than the bound, and a machine that leaves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from minato_gpu.lab.simulation import cluster
from minato_gpu.lab.simulation.cluster import Cluster, simulate
from minato_gpu.lab.simulation.virtual_loader import SILENT_S, FarNode, VirtualLoader
from minato_gpu.lab.simulation.work import Work
from minato_gpu.scheduling.policy import Policy

SMALL = Cluster(100.0, 2, hosts=2, gpus=2, cores=16, cpu_hosts=4, samples=640)


@pytest.mark.parametrize("gbit_s", [1.0, 100.0])
def test_links_and_cores_bound_the_rate_and_ranks_are_treated_alike(gbit_s: float) -> None:
    seconds, bound = simulate(replace(SMALL, gbit_s=gbit_s))
    assert bound <= max(seconds) < 1.2 * bound
    assert min(seconds) > 0.85 * max(seconds)
    assert (seconds, bound) == simulate(replace(SMALL, gbit_s=gbit_s))


def test_a_machine_that_leaves_costs_less_where_workers_are_spread() -> None:
    later = []
    for nodes in (1, 4):
        (stays, _), (leaves, bound) = (simulate(replace(SMALL, nodes=nodes, leaving=n)) for n in (0, 1))
        assert bound <= max(leaves)
        later.append(max(leaves) - max(stays))
    assert later[0] > 1.5 * later[1] > 0


def test_what_a_machine_had_is_done_by_others_and_delivered_once_in_order() -> None:
    costs = np.full(400, 0.1)
    work = Work(costs, costs, 8, (400,), 2)
    far = {"cpu:0": FarNode(6, lambda now, samples: now + 0.01, leaves_at=1.0)}
    found = VirtualLoader(work, Policy(window=64), far=far).run()
    assert found.serials.tolist() == list(range(400))
    others_s = (400 - 8 * (1.0 / 0.1)) * 0.1 / 2
    assert 1.0 + others_s <= found.makespan_s < 1.0 + others_s + 2 * SILENT_S


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "Cluster", partial(Cluster, hosts=1, gpus=2, cores=16, cpu_hosts=20, samples=640))
    rows = cluster.run()
    assert [(row["gbit_s"], row["nodes"], row["leaving"]) for row in rows] == [
        (gbit_s, nodes, leaving) for gbit_s in (25.0, 100.0) for nodes in (1, 20) for leaving in (0, 1)
    ]
