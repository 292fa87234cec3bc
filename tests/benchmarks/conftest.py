"""What the tests of several benchmarks share: a few photographs, and a process to fork from."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import pytest

from pipelines import image_classification


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of class folders."""
    directory = tmp_path_factory.mktemp("photographs")
    image_classification.example_data(directory)
    return directory


@pytest.fixture(scope="module")
def fresh() -> Iterator[Executor]:
    """A process without threads: what is forked from the tests' own waits for ever for threads that they left there."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as executor:
        yield executor
