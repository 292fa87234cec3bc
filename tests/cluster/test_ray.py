"""Agents that Ray starts, on a cluster of this machine: a head, whose program trains, and two nodes beside it; and
the manual's examples of Ray Train and Ray Data."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from minato_gpu import DataLoader, RayLanes
from minato_gpu.lanes.far import ray_lanes
from minato_gpu.lanes.far.wire import AgentError
from tests.lanes.test_far import Drawn, bits, there
from tests.support import pages
from tests.support.waiting import wait_until

ray = pytest.importorskip("ray")
pytestmark = [  # what Ray warns of is no error
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::UserWarning"),
]
TRAIN, DATA = pages.examples("minato_gpu/manual/ray.md")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """The cluster, started once for all tests; ``ray.init`` has been called."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "resources": {"gpu_node": 2}, "include_dashboard": False}
    try:
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            cluster.add_node(num_cpus=2, resources={"cpu_node": 1})
        ray.init(address=cluster.address, log_to_driver=False)
    except Exception as error:
        pytest.skip(f"Ray itself does not start on this machine: {error}")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def agents() -> list[psutil.Process]:
    """Processes that Ray's actors have started here, and that listen."""
    tied = [each for each in psutil.process_iter(["cmdline", "ppid"]) if "--tied" in (each.info["cmdline"] or ())]
    return [each for each in tied if each.info["ppid"] not in {other.pid for other in tied}]


def made(cluster: Any = None) -> Any:
    """A loader of ours with one worker here."""
    samples: Any = Drawn()
    samples.slow_here = cluster is not None
    generator = torch.Generator().manual_seed(3)
    return DataLoader(
        samples,
        8,
        num_workers=1,
        shuffle=True,
        generator=generator,
        timeout=60,
        cluster=cluster,
        persistent_workers=True,
    )


def gets_work(loader: Any) -> bool:
    """Whether the agents' workers are there in time."""
    return wait_until(lambda: len(list(loader)) == 30 and there(loader) > 0)


def all_work(loader: Any) -> bool:
    """Whether all agents are there in time. Each look is an epoch, in which what is lost is noticed."""
    return wait_until(
        lambda: len(list(loader)) == 30 and all(node["connected"] for node in loader.stats()["nodes"].values()), 60.0
    )


def test_nodes_that_are_there_that_join_and_whose_agent_is_killed(nodes: Any, caplog: pytest.LogCaptureFixture) -> None:
    expected = [bits(batch) for batch in made()]
    cluster = RayLanes(cores=6, resources={"cpu_node": 1})
    loader = made(cluster)
    assert cluster.slots == 6 and "cores=6: 2 other nodes of the Ray cluster have 4 in all" in caplog.text
    assert [bits(batch) for batch in loader] == expected
    assert gets_work(loader)
    joined = nodes.add_node(num_cpus=2, resources={"cpu_node": 1})
    assert all_work(loader) and len(agents()) == 3
    found, killed = [], False
    for batch in loader:
        found.append(batch)
        if not killed and len(found) >= 4 and there(loader) > 0:
            killed = True
            agents()[0].send_signal(signal.SIGKILL)
    assert sorted(int(key) for batch in found for key in batch["key"]) == list(range(240))
    assert killed and len(loader.stats()["nodes"]) == 3 and loader.stats()["failures"] == []
    assert all_work(loader) and len(agents()) == 3, "its actor starts another"
    del loader, cluster
    assert wait_until(lambda: agents() == [])
    nodes.remove_node(joined)


def test_agents_are_spread_and_end_where_nobody_names_them(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_lanes, "_FEWEST", 1)
    cluster = RayLanes(cores=2, resources={"cpu_node": 1})
    cluster._found()
    assert wait_until(lambda: len(agents()) == 2)
    assert len({each.parents()[1].pid for each in agents()}) == 2, "both on one node"
    gc.disable()  # what has been dropped is not left to be collected one day
    try:
        del cluster
        assert wait_until(lambda: agents() == [])
    finally:
        gc.enable()


def test_resources_that_no_node_has_are_said_at_construction(nodes: Any) -> None:
    with pytest.raises(AgentError, match="0 other nodes of the Ray cluster have 0 in all with"):
        made(RayLanes(cores=1, resources={"none": 1}))


@pytest.mark.parametrize(("cores", "error"), [(0, ValueError), (1.5, TypeError)])
def test_cores_that_are_none(cores: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="cores must be"):
        RayLanes(cores=cores)


def test_two_workers_of_ray_train(nodes: Any, tmp_path: Path) -> None:
    names: dict[str, Any] = {"folder": str(tmp_path)}
    pages.run(TRAIN, names, tmp_path)
    assert names["loss"] < 1e-3
    assert [node["connected"] for node in names["nodes"].values()] == [True]
    assert wait_until(lambda: agents() == [])


def test_rows_of_ray_data(nodes: Any, tmp_path: Path) -> None:
    data = pytest.importorskip("ray.data")
    names: dict[str, Any] = {"rows": data.range(100)}
    pages.run(DATA, names, tmp_path)
    assert names["loader"].stats()["samples_delivered"] == 100
    assert sorted(int(key) for batch in names["loader"] for key in batch["id"]) == list(range(100))
