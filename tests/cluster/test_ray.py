"""Agents that Ray starts, on a cluster of this machine: a head, whose program trains, and two nodes beside it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data.distributed import DistributedSampler

from minato_gpu import DataLoader, RayLanes
from minato_gpu.lanes.far.greeting import AgentError
from tests.lanes.test_far import Drawn, bits, there
from tests.support.waiting import wait_until

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"training": 2}})
    for _ in range(2):
        cluster.add_node(num_cpus=2, resources={"preparing": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


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


def agents() -> list[psutil.Process]:
    """Processes that Ray's actors have started here, and that listen."""
    found = [each for each in psutil.process_iter(["cmdline"]) if "--tied" in (each.info["cmdline"] or ())]
    return [each for each in found if each.parent() is not None and "--tied" not in each.parent().cmdline()]


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
    cluster = RayLanes(cores=6, resources={"preparing": 1})
    loader = made(cluster)
    assert cluster.slots == 6 and "cores=6: 2 other nodes of the Ray cluster have 4 in all" in caplog.text
    assert [bits(batch) for batch in loader] == expected
    assert gets_work(loader)
    joined = nodes.add_node(num_cpus=2, resources={"preparing": 1})
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


def _train(config: dict[str, Any]) -> None:
    """What a worker of Ray Train runs."""
    from ray import train

    ranks, rank = train.get_context().get_world_size(), train.get_context().get_world_rank()
    samples: Any = list(range(64))
    sampler: Any = DistributedSampler(samples, ranks, rank, shuffle=False)
    cluster = RayLanes(cores=4 // ranks, resources={"preparing": 1})
    loader: Any = DataLoader(samples, 8, sampler=sampler, num_workers=1, cluster=cluster)
    found = sorted(int(key) for batch in loader for key in batch)
    assert found == list(range(rank, 64, ranks)) and cluster.slots == 2
    Path(config["folder"], f"rank {rank}").write_text(str(len(found)))


def test_two_workers_of_ray_train(nodes: Any, tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1, "training": 1})
    run, told = RunConfig(storage_path=str(tmp_path)), {"folder": str(tmp_path)}
    TorchTrainer(_train, train_loop_config=told, scaling_config=scaling, run_config=run).fit()
    assert [(tmp_path / f"rank {rank}").read_text() for rank in range(2)] == ["32", "32"]
    assert wait_until(lambda: agents() == [])


def test_resources_that_no_node_has_are_said_at_construction(nodes: Any) -> None:
    with pytest.raises(AgentError, match="0 other nodes of the Ray cluster have 0 in all with"):
        made(RayLanes(cores=1, resources={"none": 1}))


@pytest.mark.parametrize(("cores", "error"), [(0, ValueError), (1.5, TypeError)])
def test_cores_that_are_none(cores: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="cores must be"):
        RayLanes(cores=cores)
