"""Ray, started once for all tests: a head, whose program trains, and two nodes beside it, all on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest

QUIET = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::UserWarning"),
]
"""Marks for tests: what Ray warns of is no error."""


@pytest.fixture(scope="session")
def nodes() -> Iterator[Any]:
    """The cluster; ``ray.init`` has been called."""
    ray = pytest.importorskip("ray")
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
