"""What the tests of several benchmarks share: a process to fork from."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor

import pytest


@pytest.fixture(scope="module")
def fresh() -> Iterator[Executor]:
    """A process without threads: what is forked from the tests' own waits for ever for threads that they left there."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as executor:
        yield executor
