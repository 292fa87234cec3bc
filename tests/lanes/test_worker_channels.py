"""What connects a loader and its workers is all there, or nothing of it."""

from __future__ import annotations

import resource

import pytest

from minato_gpu.lanes.worker_channels import WorkerChannels
from tests.support.leaks import descriptors_below, open_links


def _channels() -> WorkerChannels:
    return WorkerChannels(3, addressed=True, arenas=True, active=1)


@pytest.mark.usefixtures("no_leaks")
def test_where_descriptors_run_out_none_stays_open() -> None:
    """Whichever is the first that cannot be had."""
    _channels().close()  # what is made once is there
    before, failed = sorted(open_links()), 0
    for limit in range(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
        try:
            with descriptors_below(limit):
                _channels().close()
            break
        except OSError:
            failed += 1
        assert sorted(open_links()) == before
    assert failed > 20, failed  # so many there are, at least
