"""Segments: DALI, CuPy and torch stages one after another, over NumPy and CPU tensors where there is no GPU; and the
executor that runs them: the same content as the CPU, one bad sample harms no other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu.device.executor import DeviceExecutor, segments
from minato_gpu.device.functions import FunctionSegment
from minato_gpu.device.values import to_numpy
from minato_gpu.pipeline.pipeline import CupyFunction, DaliFragment, Field, Pipeline, Stage, TorchFunction
from minato_gpu.pipeline.stages import Fields, Params
from minato_gpu.samples import StageError
from pipelines import example_photographs, image_classification
from tests.support.fake_device import LAZY_COPIES, FakeDevice

ROW = Field(np.float32, (None,))


def add_xp(xp: Any, fields: Fields, params: Params) -> Fields:
    return {"row": fields["row"] + params["amount"]}


def add_torch(fields: Fields, params: Params) -> Fields:
    return {"row": fields["row"] + float(params["amount"])}


def add_dali(dali: Any, fields: Fields, params: Params, device: str) -> Fields:
    return {"row": fields["row"] + params["amount"]}


def refuse_negative(fields: Fields, params: Params) -> Fields:
    if float(fields["row"].min()) < 0:
        raise ValueError("a negative value")
    return {"row": fields["row"]}


def draw_amount(rng: np.random.Generator, meta: Fields) -> Params:
    return {"amount": rng.uniform(0, 10)}


def add(fields: Fields, params: Params) -> Fields:
    return {"row": fields["row"] + params["amount"]}


def mixed() -> Pipeline:
    def stage(name: str, device: Any, **changes: Any) -> Stage:
        parts: dict[str, Any] = {"cpu": add, "draw": draw_amount, **changes}
        return Stage(name, ("row",), {"row": ROW}, device=device, **parts)

    return Pipeline(
        (
            stage("a", DaliFragment(add_dali)),
            stage("b", DaliFragment(add_dali)),
            stage("check", TorchFunction(refuse_negative), cpu=refuse_negative, draw=None),
            stage("c", CupyFunction(add_xp)),
            stage("d", TorchFunction(add_torch)),
            stage("e", DaliFragment(add_dali)),
        ),
        outputs=("row",),
        inputs={"row": ROW},
    )


def test_a_device_implementation_must_write_what_the_stage_declares() -> None:
    def misnamed(dali: Any, fields: Fields, params: Params, device: str) -> Fields:
        return {"other": fields["row"]}

    def mistyped(xp: Any, fields: Fields, params: Params) -> Fields:
        return {"row": fields["row"].astype(xp.float64)}

    for device, words in ((DaliFragment(misnamed), "made"), (CupyFunction(mistyped), "dtype float64")):
        wrong = dataclasses.replace(mixed().stages[0], device=device)
        executor = DeviceExecutor(Pipeline((wrong,), outputs=("row",), inputs={"row": ROW}), 0)
        (result,) = executor.run([({"row": np.zeros(2, np.float32)}, 0)])
        assert isinstance(result, StageError)
        assert words in str(result)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_torch_stage_makes_with_gradients_on_needs_none(device: str) -> None:
    """What a module computes, and a parameter as it is."""
    weight = torch.nn.Parameter(torch.full((3,), 2.0))

    def scale(fields: Fields, params: Params) -> Fields:
        return {"row": fields["row"] * weight, "weight": weight}

    before = Stage("before", ("row",), {"row": ROW}, lambda f, p: f, CupyFunction(lambda xp, f, p: f))
    stage = Stage("scale", ("row",), {"row": ROW, "weight": ROW}, lambda f, p: f, TorchFunction(scale))
    pipeline = Pipeline((before, stage), outputs=("row", "weight"), inputs={"row": ROW})
    _, segment = segments(pipeline, range(2), device=device, max_batch=1, threads=1)
    (made,) = segment.run([{"row": torch.ones(3)}], [{1: {}}])  # of the device's: it is not brought there
    for value in made.values():
        assert not getattr(value, "requires_grad", False) and np.asarray(value).tolist() == [2.0] * 3


@pytest.mark.gpu
def test_all_kinds_hand_over_to_each_other_on_a_gpu() -> None:
    pipeline = mixed()
    executor = DeviceExecutor(pipeline, 0, device="cuda", max_batch=4)
    rows = [{"row": np.full(n + 1, n, np.float32)} for n in range(4)]
    for n, result in enumerate(executor.run([(row, n) for n, row in enumerate(rows)])):
        assert not isinstance(result, StageError), result
        assert not isinstance(result["row"], np.ndarray)
        np.testing.assert_allclose(to_numpy(result["row"]), pipeline.run(rows[n], n)["row"], rtol=1e-6)
    assert executor.repeated == 0
    executor.close()


def _same(fields: Any, params: Any) -> Any:
    return {"x": fields["x"], "n": fields["n"]}


def test_a_gpus_torch_stage_does_not_wait_for_what_it_is_given() -> None:
    """``torch.tensor(array, device="cuda")`` waits for the stream, at every sample."""
    device = FakeDevice(LAZY_COPIES)
    writes = {"x": Field(np.float32, (2,)), "n": Field(np.int64)}
    read = Stage("read", ("k",), writes, cpu=_same)
    stage = Stage("same", ("x", "n"), writes, cpu=_same, device=TorchFunction(_same))
    pipeline = Pipeline((read, stage), outputs=("x",), name="tests")
    segment = FunctionSegment(pipeline, range(1, 2), device="cuda", accelerator=device)
    batch = [{"x": np.full(2, number, np.float32), "n": np.int64(number)} for number in range(4)]
    stream = device.stream()
    with device.running(stream):
        made = segment.run(batch, [{1: {}}] * 4)
    assert (stream.issued, stream.done) == (4, 0), "one copy for each, and none has run"
    assert device.waited == []
    device.finish()
    assert [(one["x"].tolist(), int(one["n"])) for one in made] == [([float(n)] * 2, n) for n in range(4)]


SHIFTS = np.arange(4, dtype=np.float32)  # the data set's own, whoever draws of them


def _draw(rng: np.random.Generator, meta: Any) -> Any:
    return {"shifts": SHIFTS[1:]}


def _sum(fields: Any, params: Any) -> Any:
    """All that it is given, twice, and changed where it lies."""
    row, (numbers, view), shifts = fields["row"], fields["parts"], params["shifts"]
    for one in (row, view, shifts):
        one *= 2
    numbers.append(sum(numbers))
    if float(row[0]) < 0:
        raise ValueError("a negative value")
    return {"sum": row + float(view.sum()) + float(shifts.sum()) + sum(numbers)}


@pytest.mark.parametrize("kind", ["cupy", "torch"])
@pytest.mark.parametrize("nested", ["array", "view"])
def test_what_a_function_is_given_is_its_own(kind: str, nested: str) -> None:
    """A micro-batch that failed runs once more, sample by sample; and what passes through is as it was."""
    how = CupyFunction(lambda xp, fields, params: _sum(fields, params)) if kind == "cupy" else TorchFunction(_sum)
    stage = Stage("sum", ("row", "parts"), {"sum": Field(np.float32, (3,))}, cpu=_sum, device=how, draw=_draw)
    pipeline = Pipeline((stage,), outputs=("sum", "row", "parts"), name="tests")
    whole = torch.arange(9.0).view(3, 3)  # a data set in memory, of whose rows samples are views
    whole[1, 0] = -1
    before, lists = whole.clone(), [[1, 2] for _ in range(3)]
    parts: list[Any] = [whole[2] if nested == "view" else np.full(2, n) for n in range(3)]
    samples = [{"row": whole[n], "parts": (lists[n], parts[n])} for n in range(3)]
    executor = DeviceExecutor(pipeline, 0, max_batch=4)
    results = executor.run([(sample, n) for n, sample in enumerate(samples)])
    executor.close()
    assert torch.equal(whole, before) and lists == [[1, 2]] * 3 and SHIFTS.tolist() == [0, 1, 2, 3]
    assert isinstance(results[1], StageError)
    for n in (0, 2):
        result = results[n]
        assert not isinstance(result, StageError)
        wanted = 2 * before[n] + 2 * float(parts[n].sum()) + 12 + 6
        assert np.array_equal(result["sum"], wanted)
        assert result["row"] is samples[n]["row"] and result["parts"] is samples[n]["parts"]


# --- the executor: one bad sample harms no other -------------------------------------------------------------------


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
    assert executor.repeated == 0


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
    for n, fields in enumerate(photographs):
        if n != 3:
            assert np.abs(image(results[n]) - pipeline.run(fields, n)["image"]).max() <= GREY_LEVELS
    repeated = 7 if how == "cut off" else 8  # the others run again together, or, where none is named, each by itself
    assert executor.repeated == repeated
    again = executor.run(items(pipeline, photographs, 2))
    assert all(not isinstance(result, StageError) for result in again)
    assert executor.repeated == repeated
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
    assert executor.repeated == 0
