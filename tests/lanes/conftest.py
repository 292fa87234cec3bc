"""Channels of workers that run in the test's own process."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from minato_gpu.lanes.worker_channels import WorkerChannels
from tests.lanes.harness import open_links


@pytest.fixture
def links() -> Iterator[WorkerChannels]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with open_links(2) as links:
        yield links
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
