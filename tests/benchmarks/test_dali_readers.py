"""DALI with its own readers: every sample once and in its place, and pictures that are the pipelines' own but for what
DALI draws."""

from __future__ import annotations

import importlib.util
from concurrent.futures import Executor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from benchmarks.compare.content import Reader, leaves
from benchmarks.compare.dali_readers import DaliReaders
from benchmarks.compare.workloads import INDEX, Begun, Prepared, job, with_index
from benchmarks.isolate import isolated
from benchmarks.peers import Job
from minato_gpu import Pipeline
from pipelines import image_classification, object_detection, segmentation_3d, speech_recognition
from pipelines.example_photographs import SUBSAMPLING, jpeg, photograph

pytestmark = pytest.mark.on_request  # what a peer delivers changes with the peer
_EPOCHS = 2
_SQUARES = ("astronaut.png", "camera.png", "moon.png")
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


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures as wide as high: a box of their whole area is the same box for whoever draws it."""
    directory = tmp_path_factory.mktemp("squares")
    for number, name in enumerate(5 * _SQUARES):
        folder = directory / Path(name).stem
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(jpeg(photograph(name)[:510, :510], SUBSAMPLING[number % 3]))
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


@_needs_dali
def test_crops_are_the_pictures_own(fresh: Executor, photographs: Path) -> None:
    fresh.submit(isolated, _deliver_crops, photographs).result()


def _deliver_crops(directory: Path) -> None:
    """33 pictures in batches of 4, so that the reader's second epoch begins within a batch."""
    asked = job("image_classification", directory, workers=2)
    assert len(asked.source) % asked.batch_size
    first, second = _epochs(asked)
    for batch in first + second:
        indices = batch[INDEX].tolist()
        expected = asked.join([asked.dataset[index] for index in indices])
        _check_form(batch, expected)
        assert batch["label"].tolist() == expected["label"].tolist()
        for index, image in zip(indices, batch["image"], strict=True):
            _check_colours(asked, index, image.numpy())
    large = [index for index in range(len(asked.source)) if "whole" in asked.source[index]["path"]]
    drawn = [torch.cat([batch["image"] for batch in epoch]) for epoch in (first, second)]
    assert all(not torch.equal(drawn[0][index], drawn[1][index]) for index in large), "the same box in each epoch"


def _check_colours(asked: Job, index: int, image: Any) -> None:
    """No channel is darker or brighter than anywhere in the file: interpolation between pixels cannot be."""
    picture = cv2.imread(asked.source[index]["path"], cv2.IMREAD_COLOR_RGB)
    assert picture is not None
    normal = (picture.reshape(-1, 3) / 255 - image_classification.MEAN) / image_classification.STD
    channels = image.reshape(3, -1)
    assert (channels.min(axis=1) >= normal.min(axis=0) - _limit(asked)).all()
    assert (channels.max(axis=1) <= normal.max(axis=0) + _limit(asked)).all()


@_needs_dali
def test_whole_squares_are_the_pipelines_but_for_the_mirror(fresh: Executor, squares: Path) -> None:
    fresh.submit(isolated, _deliver_squares, squares).result()


def _deliver_squares(directory: Path) -> None:
    asked = job("image_classification", directory, workers=2)
    everything: dict[str, Any] = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0)}
    asked = replace(_with(asked, image_classification.build(**everything)), batch_size=4)
    flips = [_with(asked, image_classification.build(**everything, flip=flip)) for flip in (0.0, 1.0)]
    seen = set()
    for batch in chain.from_iterable(_epochs(asked)):
        for at, index in enumerate(batch[INDEX].tolist()):
            matching = {
                number
                for number, flip in enumerate(flips)
                if _off(flip.dataset[index]["image"], batch["image"][at]) <= _limit(asked)
            }
            assert matching, index
            seen |= matching
    assert seen == {0, 1}


@_needs_dali
def test_detections_are_the_pipelines_but_for_the_mirror(fresh: Executor, scenes: Path) -> None:
    fresh.submit(isolated, _deliver_detections, scenes, "polygons").result()


@_needs_dali
def test_bitmaps_are_mirrored_with_their_pictures(fresh: Executor, scenes: Path) -> None:
    fresh.submit(isolated, _deliver_detections, scenes, "bitmaps").result()


def _deliver_detections(directory: Path, masks: str) -> None:
    asked = replace(job("object_detection", directory, workers=2), batch_size=4)
    small: dict[str, Any] = {"shorter": 160, "longest": 266, "masks": masks}
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


@_needs_dali
def test_samples_begun_ahead_are_counted(fresh: Executor, scenes: Path) -> None:
    ahead, count = fresh.submit(isolated, _ahead, scenes).result()
    assert ahead == _LOADER.prefetch * count


def _ahead(directory: Path) -> tuple[int, int]:
    """Of the second epoch after the first, where each batch is one sample."""
    begun = Begun(len(object_detection.dataset(directory)))
    asked = job("object_detection", directory, workers=2, begun=begun)
    made = _LOADER.make(asked)
    for _ in made:
        pass
    return int(begun.beyond(1).sum()), asked.batch_size


@_needs_dali
def test_an_epoch_left_early_is_an_error(fresh: Executor, photographs: Path) -> None:
    fresh.submit(isolated, _leave_early, photographs).result()


def _leave_early(directory: Path) -> None:
    made = _LOADER.make(job("image_classification", directory, workers=2))
    next(iter(made))
    with pytest.raises(RuntimeError, match="left early"):
        next(iter(made))


def test_only_photographs_can_run(photographs: Path, scenes: Path) -> None:
    asked = job("image_classification", photographs, workers=1)
    assert DaliReaders.can_run(asked) and DaliReaders.can_run(job("object_detection", scenes, workers=1))
    assert not DaliReaders.can_run(replace(asked, pipeline=None))
    for other in (segmentation_3d.pipeline(), speech_recognition.pipeline()):
        assert not DaliReaders.can_run(replace(asked, pipeline=other))
