"""The comparison: one content for all loaders, a check that sees a changed or lost sample, and a run at toy size."""

from __future__ import annotations

import copy
import importlib.util
import json
from concurrent.futures import Executor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.compare.dali import DaliReaders
from benchmarks.compare.run import CANDIDATES, Alone, allowed
from benchmarks.compare.workloads import INDEX, Prepared, Reader, job, leaves, same_content, with_index
from benchmarks.isolate import isolated
from benchmarks.peers import Job, Loader
from benchmarks.work import ContentError
from minato_gpu import Pipeline
from minato_gpu.pipeline.stages import Tolerance
from pipelines import object_detection, segmentation_3d, speech_recognition
from tests.support import programs


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
    if importlib.util.find_spec(loader.package.partition(".")[0]) is None:
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
        if not getattr(loader, "own_draws", False):
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


@pytest.mark.on_request  # seven seconds, of what is benchmarks' own
@pytest.mark.timeout(240)
def test_a_run_at_toy_size(tmp_path: Path) -> None:
    names = ["--loader", "pytorch in order", "--loader", "minato_gpu in order"]
    said = programs.run("benchmarks.compare", "image_classification", *names, "--quick", "--json", "-")
    rows = json.loads(said)["rows"]
    assert [row["loader"] for row in rows] == ["pytorch in order", "minato_gpu in order"]
    assert all(row["samples_per_s"] > 0 and row["peak_pss_bytes"] > 1e6 and row["lateness_max"] == 0 for row in rows)
    assert all(row["efficiency"] > 0 and row["cpu_s_per_sample"] > 0 and row["repetitions"] > 0 for row in rows)


def test_what_one_process_needs(fresh: Executor, photographs: Path) -> None:
    alone = fresh.submit(isolated, _alone, photographs).result()
    assert len(alone.costs_s) >= 8 and alone.cpu_s >= alone.costs_s.sum() > 0
    assert alone.sample_bytes >= 3 * 4


def _alone(photographs: Path) -> Alone:
    return Alone.measured(job("image_classification", photographs, workers=1), repeats=1)


# --- DALI with readers of its own: samples are the pipelines' but for what DALI draws ---------------------------------


_EPOCHS = 2
_LOADER = DaliReaders("dali readers")

_needs_dali = pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None,
    reason="nvidia.dali is not installed",
)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scenes")
    object_detection.example_data(directory)
    return directory


def _with(asked: Job, pipeline: Pipeline) -> Job:
    indexed = with_index(pipeline)
    return replace(asked, pipeline=indexed, dataset=Prepared(asked.source, indexed, asked.dataset.seed))


def _epochs(asked: Job) -> list[list[Any]]:
    """The batches of each epoch, checked for order and for what a batch consists of."""
    made, reader, epochs = _LOADER.make(asked), Reader(asked.batch_size), []
    first = None
    for _ in range(_EPOCHS):
        batches = []
        reader.begin_epoch()
        for batch in made:
            reader.read(batch)
            batches.append(batch)
            first = first if first is not None else torch.clone(batch["image"])
        assert [batch[INDEX].tolist() for batch in batches] == asked.batches
        epochs.append(batches)
    assert first is not None and torch.equal(first, epochs[0][0]["image"]), "a batch's memory was used again"
    reader.check(len(asked.source), _EPOCHS)
    assert reader.late == 0
    _LOADER.close(made)
    return epochs


def _check_form(batch: Any, expected: Any) -> None:
    assert list(batch) == list(expected)
    for name, wanted in expected.items():
        assert type(batch[name]) is type(wanted), name
        found = [(leaf.shape, leaf.dtype) for leaf in leaves(batch[name])]
        assert found == [(leaf.shape, leaf.dtype) for leaf in leaves(wanted)], name


def _off(one: Any, other: Any) -> float:
    return float(np.abs(np.asarray(one) - np.asarray(other)).max(initial=0.0))


def _limit(asked: Job) -> float:
    image = asked.pipeline.fields_at(len(asked.pipeline.stages))["image"]
    return float(asked.pipeline.tolerance["cpu"].maximum * image.level)


@pytest.mark.on_request  # what a peer delivers changes with the peer
@_needs_dali
def test_detections_are_the_pipelines_but_for_the_mirror(fresh: Executor, scenes: Path) -> None:
    fresh.submit(isolated, _deliver_detections, scenes).result()


def _deliver_detections(directory: Path) -> None:
    asked = replace(job("object_detection", directory, workers=2), batch_size=4)
    small: dict[str, Any] = {"shorter": 160, "longest": 266}
    asked = _with(asked, object_detection.build(**small))
    assert len(asked.source) % asked.batch_size
    flips = [_with(asked, object_detection.build(**small, flip=flip)) for flip in (0.0, 1.0)]
    seen = set()
    for batch in chain.from_iterable(_epochs(asked)):
        indices = batch[INDEX].tolist()
        expected = [flip.join([flip.dataset[index] for index in indices]) for flip in flips]
        for each in expected:
            _check_form(batch, each)
        for at in range(len(indices)):
            matching = {number for number, each in enumerate(expected) if _same_sample(batch, each, at, _limit(asked))}
            assert len(matching) == 1, indices[at]
            seen |= matching
    assert seen == {0, 1}


def _same_sample(batch: Any, expected: Any, at: int, limit: float) -> bool:
    """The picture with all that is beside it in the batch within the limit, everything else exactly."""
    return all(
        _off(wanted[at], batch[name][at]) <= limit if name == "image" else torch.equal(wanted[at], batch[name][at])
        for name, wanted in expected.items()
    )


@pytest.mark.on_request
def test_only_photographs_can_run(photographs: Path, scenes: Path) -> None:
    asked = job("image_classification", photographs, workers=1)
    assert DaliReaders.can_run(asked) and DaliReaders.can_run(job("object_detection", scenes, workers=1))
    assert not DaliReaders.can_run(replace(asked, pipeline=None))
    for other in (segmentation_3d.pipeline(), speech_recognition.pipeline()):
        assert not DaliReaders.can_run(replace(asked, pipeline=other))
