"""What connects a loader and its workers is all there, or nothing of it."""

from __future__ import annotations

import resource

import pytest

from minato_gpu.lanes.worker_channels import WorkerChannels
from tests.leaks import open_links


def _channels() -> WorkerChannels:
    return WorkerChannels(3, addressed=True, arenas=True, active=1)


@pytest.mark.usefixtures("no_leaks")
def test_where_descriptors_run_out_none_stays_open() -> None:
    """Whichever is the first that cannot be had."""
    _channels().close()  # what is made once is there
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before, failed = sorted(open_links()), 0
    for limit in range(3, soft):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            _channels().close()
            break
        except OSError:
            failed += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert sorted(open_links()) == before
    assert failed > 20, failed  # so many there are, at least
