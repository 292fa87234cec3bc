"""The comparison: one content for all loaders, and a check that sees a changed or lost sample."""

from __future__ import annotations

import copy
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare.run import CANDIDATES, allowed
from benchmarks.compare.workloads import INDEX, Reader, job, same_content
from benchmarks.isolate import isolated
from benchmarks.peers import Job, Loader
from benchmarks.peers.base import available
from benchmarks.work import ContentError
from minato_gpu.pipeline.stages import Tolerance
from pipelines import speech_recognition


@pytest.fixture(scope="module")
def asked(photographs: Path) -> Job:
    return job("image_classification", photographs, workers=2)


_OFTEN = ("in order", "pipeline, cpu", "pipeline, device", "pipeline, hybrid bounded")


def _on_request_if_alike(name: str) -> Any:
    """What a peer delivers changes with the peer; other settings of ours are made of the same parts."""
    often = name.removeprefix("minato_gpu ") in _OFTEN
    return pytest.param(name, marks=() if often else pytest.mark.on_request)


@pytest.mark.parametrize("name", [_on_request_if_alike(name) for name in CANDIDATES])
def test_every_loader_delivers_the_same_samples(fresh: Executor, photographs: Path, name: str) -> None:
    loader = CANDIDATES[name][0]
    if not available(loader.package):
        pytest.skip(f"{loader.package} is not installed")
    fresh.submit(isolated, _deliver, "image_classification", photographs, loader).result()


@pytest.mark.parametrize(
    "name", [pytest.param("minato_gpu pipeline, hybrid", marks=pytest.mark.on_request), "minato_gpu pipeline, device"]
)
def test_voices_through_the_device_lane(fresh: Executor, tmp_path: Path, name: str) -> None:
    """Their pipeline declares no limit of its own: its stages' limits add up."""
    speech_recognition.example_data(tmp_path)
    (tmp_path / "steps.json").write_text('{"light_rounds": 9, "heavy_rounds": 20, "every": 5}', encoding="utf-8")
    fresh.submit(isolated, _deliver, "speech_recognition", tmp_path, CANDIDATES[name][0]).result()


def _deliver(workload: str, directory: Path, loader: Loader) -> None:
    asked = job(workload, directory, workers=2)
    made, reader = loader.make(asked), Reader(asked.batch_size)
    tolerance = allowed(asked, loader)
    for batch in made:
        reader.read(batch)
        if not loader.own_draws:
            same_content(copy.deepcopy(batch), asked, tolerance)
        del batch
    reader.check(len(asked.source), epochs=1)
    assert reader.late <= (8 if loader.order == "bounded" else 0 if loader.order == "in order" else 99)


def _batch(asked: Job) -> Any:
    return asked.join([asked.dataset[index] for index in range(4)])


def test_a_changed_sample_is_seen(asked: Job) -> None:
    batch = _batch(asked)
    same_content(batch, asked, None)
    batch["image"][1, 0, 0, 0] += 0.5
    with pytest.raises(ContentError, match="image of samples"):
        same_content(batch, asked, None)
    with pytest.raises(ContentError, match="image of samples"):
        same_content(batch, asked, Tolerance(2, 0.25))


def test_a_lost_sample_is_seen(asked: Job) -> None:
    reader = Reader(4)
    reader.read(_batch(asked))
    with pytest.raises(ContentError, match="once per epoch"):
        reader.check(5, epochs=1)


def test_lateness_counts_batches(asked: Job) -> None:
    reader = Reader(4)
    batch = _batch(asked)
    for first in (4, 8, 0):
        batch[INDEX] = first + batch[INDEX] % 4
        reader.read(batch)
    assert reader.late == 2
