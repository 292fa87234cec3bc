"""Channels of workers that run in the test's own process, and its generators as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.sources.cluster_token import TOKEN
from tests.lanes.harness import open_links


@pytest.fixture
def links(generators: None) -> Iterator[WorkerChannels]:
    with open_links(2) as links:
        yield links


@pytest.fixture
def generators() -> Iterator[None]:
    """They are put back."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hosts of a cluster know."""
    monkeypatch.setenv(TOKEN, "a token of the tests")
