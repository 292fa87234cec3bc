"""The device executor: same content as the CPU, one bad sample harms no other, results may be kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from minato_gpu.device.executor import DeviceExecutor
from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.pipeline.stages import Fields
from minato_gpu.samples import StageError
from pipelines import example_photographs, image_classification

GREY_LEVELS = 2 / 255 / min(image_classification.STD)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("photographs") / "chelsea"
    directory.mkdir()
    cat = example_photographs.photograph("chelsea.png")
    for number in range(8):
        cut = cat[number * 7 :, : 451 - number * 31]
        (directory / f"{number}.jpg").write_bytes(example_photographs.jpeg(cut))
    data = image_classification.dataset(directory.parent)
    return [data[n] for n in range(len(data))]


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return image_classification.build(size=64)


@pytest.fixture
def executor(pipeline: Pipeline) -> Iterator[DeviceExecutor]:
    executor = DeviceExecutor(pipeline, pipeline.host_prefix, max_batch=8, threads=1)
    yield executor
    executor.close()


def items(pipeline: Pipeline, samples: list[dict[str, Any]], split: int) -> list[tuple[Fields, int]]:
    return [(pipeline.run(fields, seed, stop=split), seed) for seed, fields in enumerate(samples)]


def expected(pipeline: Pipeline, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [pipeline.run(fields, seed) for seed, fields in enumerate(samples)]


def image(result: dict[str, Any] | StageError) -> Any:
    assert not isinstance(result, StageError), result
    return result["image"]


def test_a_sample_does_not_depend_on_its_micro_batch(
    pipeline: Pipeline, photographs: list[dict[str, Any]], executor: DeviceExecutor
) -> None:
    given = items(pipeline, photographs, 2)
    together = executor.run(given)
    alone = [executor.run([one])[0] for one in given]
    in_threes = [result for n in range(0, 8, 3) for result in executor.run(given[n : n + 3])]
    for a, b, c in zip(together, alone, in_threes, strict=True):
        assert np.array_equal(image(a), image(b))
        assert np.array_equal(image(a), image(c))
    assert executor.batches.repeated == 0


def corrupt(fields: Fields, how: str) -> dict[str, Any]:
    """As a file may arrive after its header was read: emptied, replaced, or broken inside."""
    encoded = fields["encoded"]
    broken = {
        "empty": encoded[:0],
        "garbage": np.arange(5000, dtype=np.uint8),
        "cut off": encoded[: len(encoded) // 3],
    }[how]
    return {**fields, "encoded": broken}


@pytest.mark.parametrize("how", ["empty", "garbage", "cut off"])
def test_a_broken_picture_is_alone_in_failing(
    pipeline: Pipeline, photographs: list[dict[str, Any]], executor: DeviceExecutor, how: str
) -> None:
    given = items(pipeline, photographs, 2)
    whole = {**given[3][0], "box": np.array([0, 0, *given[3][0]["size"]], np.int32)}
    given[3] = (corrupt(whole, how), given[3][1])
    results = executor.run(given)
    failure = results[3]
    assert isinstance(failure, StageError)
    assert (failure.origin.stage, failure.origin.lane) == (None, "device")
    assert str(failure).startswith("the pipeline failed: RuntimeError: ") and "in decode_dali\n" in str(failure)
    assert failure.origin.path == photographs[3]["path"]
    assert failure.__cause__ is not None
    for n, reference in enumerate(expected(pipeline, photographs)):
        if n != 3:
            assert np.abs(image(results[n]) - reference["image"]).max() <= GREY_LEVELS
    repeated = 7 if how == "cut off" else 8  # the others run again together, or, where none is named, each by itself
    assert executor.batches.repeated == repeated
    again = executor.run(items(pipeline, photographs, 2))
    assert all(not isinstance(result, StageError) for result in again)
    assert executor.batches.repeated == repeated
    assert executor.builds == 1


@pytest.mark.parametrize(
    ("change", "stage", "words"),
    [
        ({"encoded": None}, "decode", "'encoded' is a NoneType"),
        ({"box": np.zeros(3, np.int32)}, "decode", r"'box' has shape \(3,\)"),
        ({"box": np.zeros(4, np.int64)}, "decode", "'box' has dtype int64"),
    ],
)
def test_a_sample_that_is_not_as_declared_never_enters_the_graph(
    pipeline: Pipeline,
    photographs: list[dict[str, Any]],
    executor: DeviceExecutor,
    change: dict[str, Any],
    stage: str,
    words: str,
) -> None:
    given = items(pipeline, photographs, 2)
    given[0] = ({**given[0][0], **change}, 0)
    results = executor.run(given)
    assert isinstance(results[0], StageError)
    with pytest.raises(StageError, match=words):
        raise results[0]
    assert results[0].origin.stage == stage
    assert all(not isinstance(result, StageError) for result in results[1:])
    assert executor.batches.repeated == 0
