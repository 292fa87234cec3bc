"""P6 with on_error: a bad sample is raised, tried again or left out, always counted, and takes nothing else with it."""

from __future__ import annotations

import contextlib
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader, Pipeline, Stage
from minato_gpu.faults.failures import BadSample, TooManyFailures
from minato_gpu.pipeline import Field, TorchFunction
from pipelines import example_photographs, image_classification
from tests.contracts.broken import BAD, COLLATE, GOOD, broken, numbers
from tests.contracts.datasets import Made
from tests.contracts.modes import BOUNDED_8, MINATO, Mode

_FORK = multiprocessing.get_context("fork")


@pytest.mark.parametrize("collate", COLLATE)
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_skip(mode: Mode, workers: int, collate: str) -> None:
    loader = mode.loader(
        Made(40, broken), 4, num_workers=workers, on_error="skip", collate_fn=COLLATE[collate], shuffle=False
    )
    for _ in range(2):
        batches = list(loader)
        assert sorted(numbers(batches)) == GOOD
        assert len(batches) == 10
        if workers == 0 or not mode.lateness:
            assert numbers(batches) == GOOD
        stats = loader.stats()
        assert (stats["samples_delivered"], stats["samples_failed"], stats["samples_skipped"]) == (36, 4, 0)
        assert stats["samples_delivered"] + stats["samples_failed"] == stats["samples_expected"]
        told = [(bad["position"], bad["index"], bad["lane"], bad["error"]) for bad in stats["failures"]]
        assert sorted(told) == [(index, str(index), "cpu", "ValueError") for index in BAD]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_batches_that_lose_everything(mode: Mode, workers: int) -> None:
    """They are left out: there is nothing to deliver, and no other rank that counts on them."""
    loader = mode.loader(Made(40, broken), None, num_workers=workers, on_error="skip")
    assert sorted(int(number) for number in loader) == GOOD
    assert loader.stats()["samples_failed"] == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_data_sets_that_fetch_many(workers: int) -> None:
    class Many(Made):
        def __getitems__(self, keys: list[int]) -> list[Any]:
            return [self.make(key) for key in keys]

    assert numbers(DataLoader(Many(40, broken), 4, num_workers=workers, on_error="skip")) == GOOD


@pytest.mark.parametrize("workers", [0, 2])
def test_data_sets_that_fetch_fewer_than_they_are_asked_for(workers: int) -> None:
    """What is missing is counted; a batch of which nothing comes is an error where nothing may be left out."""

    class Fewer(Made):
        def __getitems__(self, keys: list[int]) -> list[Any]:
            return [self.make(key) for key in keys if not 8 <= key <= 12]

    loader = DataLoader(Fewer(40, torch.tensor), 4, num_workers=workers, on_error="skip")
    assert numbers(loader) == [index for index in range(40) if not 8 <= index <= 12]
    stats = loader.stats()
    assert (stats["samples_delivered"], stats["samples_failed"]) == (35, 5)
    with pytest.raises((IndexError, ValueError)):
        list(DataLoader(Fewer(12, torch.tensor), 4, num_workers=workers))


@pytest.mark.parametrize("on_error", ["skip", "retry"])
@pytest.mark.parametrize("kind", ["process", "thread"])
@pytest.mark.parametrize("collate", COLLATE)
def test_a_worker_that_cannot_start_is_not_its_samples_fault(kind: str, on_error: str, collate: str) -> None:
    def begin(worker: int) -> None:
        raise OSError("no disk")

    more: dict[str, Any] = {"worker_kind": kind, "on_error": on_error, "collate_fn": COLLATE[collate]}
    loader = DataLoader(Made(8, torch.tensor), 2, num_workers=1, worker_init_fn=begin, **more)
    with pytest.raises(OSError, match="no disk"):
        list(loader)


def test_host_reads_of_a_worker_that_cannot_start() -> None:
    def begin(worker: int) -> None:
        raise OSError("no disk")

    data = Made(8, lambda index: {"x": np.float32(index)})
    field = Field(np.float32, ())
    double = Stage(
        "double",
        reads=("x",),
        writes={"x": field},
        cpu=lambda fields, params: {"x": fields["x"] * np.float32(2)},
        device=TorchFunction(lambda fields, params: {"x": fields["x"] * 2}),
    )
    pipeline = Pipeline((double,), inputs={"x": field}, outputs=("x",))
    more: dict[str, Any] = {"pipeline": pipeline, "lanes": ("device",), "on_error": "skip"}
    with pytest.raises(OSError, match="no disk"):
        list(DataLoader(data, 2, num_workers=1, worker_init_fn=begin, **more))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_decides(workers: int) -> None:
    seen: list[BadSample] = []

    def decide(bad: BadSample) -> str:
        seen.append(bad)
        return "raise" if bad.index == 17 else "skip"

    received: list[int] = []
    loader = DataLoader(Made(40, broken), 4, num_workers=workers, on_error=decide)
    with pytest.raises(ValueError, match="sample 17 is broken"):
        received.extend(int(number) for batch in loader for number in batch)
    assert received == [index for index in range(16) if index not in BAD]
    assert [(bad.epoch, bad.position, bad.index, bad.error) for bad in seen] == [
        (0, 5, 5, "ValueError"),
        (0, 6, 6, "ValueError"),
        (0, 17, 17, "ValueError"),
    ]
    assert "raise ValueError" in seen[0].traceback and "broken" in seen[0].traceback


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_is_refused_is_not_counted_as_delivered(workers: int) -> None:
    loader = DataLoader(Made(40, broken), 4, num_workers=workers, on_error=lambda bad: "raise", shuffle=False)
    iterator, delivered = iter(loader), 0
    for _ in range(10):
        with contextlib.suppress(ValueError):
            delivered += len(next(iterator))
    assert next(iterator, None) is None
    stats = loader.stats()
    assert (stats["samples_delivered"], stats["samples_failed"], stats["samples_skipped"]) == (28, 4, 8)
    assert (delivered, stats["batches_delivered"]) == (28, 7)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_share_of_an_unknown_number(workers: int) -> None:
    """The first failure is a large share of what has been seen, and says little; a second soon after is too many."""
    batches = [list(range(lo, lo + 8)) for lo in range(0, 400, 8)]
    for bad, fits in (({3}, True), ({3, 390}, True), ({3, 5}, False)):

        def make(index: int, bad: set[int] = bad) -> Any:
            if index in bad:
                raise ValueError("broken")
            return torch.tensor(index)

        loader = DataLoader(
            Made(400, make), batch_sampler=batches, num_workers=workers, on_error="skip", max_failures=0.05
        )
        if fits:
            assert len(numbers(loader)) == 400 - len(bad)
        else:
            with pytest.raises(TooManyFailures):
                list(loader)


def test_an_answer_that_means_nothing() -> None:
    with pytest.raises(ValueError, match="on_error returned None"):
        list(DataLoader(Made(40, broken), 4, num_workers=1, on_error=lambda bad: None))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_iteration_of_on_error_does_not_end_the_loop_without_a_word(workers: int) -> None:
    def stop(bad: Any) -> str:
        raise StopIteration

    with pytest.raises(RuntimeError, match="on_error raised StopIteration"):
        list(DataLoader(Made(40, broken), 4, num_workers=workers, on_error=stop))


_LIMITS: list[tuple[Any, bool]] = [(4, True), (3, False), (0.1, True), (0.05, False), (0, False)]
_LIMITS += [(np.int64(4), True), (np.int64(3), False), (np.float32(0.125), True), (np.float16(0.05), False)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("limit", "fits"), _LIMITS)
def test_the_budget(limit: Any, fits: bool, workers: int) -> None:
    loader = DataLoader(Made(40, broken), 4, num_workers=workers, on_error="skip", max_failures=limit)
    if fits:
        assert numbers(loader) == GOOD
    else:
        with pytest.raises(TooManyFailures, match="samples failed in this epoch, max_failures="):
            list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_retry(workers: int) -> None:
    """What fails once is tried again, unseen; what fails twice is raised."""
    tries = _FORK.Array("i", 40)

    def flaky(index: int) -> Any:
        tries[index] += 1
        if index in BAD and tries[index] < 2:
            raise OSError("try again")
        return torch.tensor(index)

    loader = DataLoader(Made(40, flaky), 4, num_workers=workers, on_error="retry")
    assert numbers(loader) == list(range(40))
    assert [tries[index] for index in BAD] == [2, 2, 2, 2]
    with pytest.raises(ValueError, match="sample 5 is broken"):
        list(DataLoader(Made(40, broken), 4, num_workers=workers, on_error="retry"))


def _shift_in_place(fields: Any, params: Any) -> Any:
    """Works in place, as a CPU stage may, and raises afterwards at its first try of every other sample."""
    row, tries = fields["row"], fields["tries"]
    row += 100
    tries += 1
    index = int(fields["index"])
    if index % 2 and not _TRIED[index]:
        _TRIED[index] = 1
        raise OSError("try again")
    return {"row": row}


_TRIED = _FORK.Array("i", 40)
_ROW, _INDEX = Field(np.float32, (4,)), Field(np.int64)
_IN_PLACE = Pipeline(
    (
        Stage(
            "read",
            reads=("number",),
            writes={"row": _ROW, "index": _INDEX, "tries": Field(np.int64, (1,))},
            cpu=lambda fields, params: {
                "row": np.full(4, fields["number"], np.float32),
                "index": fields["number"],
                "tries": np.zeros(1, np.int64),
            },
        ),
        Stage(
            "shift",
            reads=("row", "index", "tries"),
            writes={"row": _ROW},
            cpu=_shift_in_place,
            device=TorchFunction(lambda fields, params: {"row": fields["row"] + 100}),
        ),
    ),
    outputs=("row", "index"),
)


@pytest.mark.parametrize("kind", ["process", "thread"])
@pytest.mark.parametrize("lanes", [("cpu",), ("cpu", "device")], ids="+".join)
def test_a_second_try_sees_what_the_first_one_saw(lanes: tuple[str, ...], kind: str) -> None:
    for index in range(40):
        _TRIED[index] = 0
    data = Made(40, lambda index: {"number": index})
    loader = DataLoader(
        data, 4, num_workers=1, pipeline=_IN_PLACE, lanes=lanes, worker_kind=kind, on_error="retry", shuffle=False
    )
    found = [row[0] for batch in loader for row in batch["row"].tolist()]
    assert found == [index + 100.0 for index in range(40)]


def test_what_was_left_out_is_not_asked_for_again() -> None:
    def make() -> Any:
        return BOUNDED_8.loader(Made(40, broken), 4, num_workers=2, on_error="skip")

    for step in (2, 3, 6):
        loader = make()
        iterator = iter(loader)
        first = [next(iterator) for _ in range(step)]
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        assert sorted(numbers([*first, *resumed])) == GOOD
        failed = loader.stats()["samples_failed"] + resumed.stats()["samples_failed"]
        assert failed == 4


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"on_error": "ignore"}, ValueError, "on_error must be 'raise', 'skip', 'retry' or a function"),
        ({"max_failures": 3}, ValueError, "leaves nothing out"),
        ({"on_error": "skip", "max_failures": -1}, ValueError, "a count"),
        ({"on_error": "skip", "max_failures": 1.5}, ValueError, "a share"),
        ({"on_error": "skip", "max_failures": "3"}, TypeError, "max_failures must be"),
        ({"on_error": "skip", "max_failures": np.float32(1.5)}, ValueError, "a share"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DataLoader(Made(4, broken), **arguments)


@pytest.mark.parametrize("lanes", [("cpu",), ("cpu", "device"), ("device",)], ids=str)
def test_broken_photographs(tmp_path: Path, lanes: tuple[str, ...]) -> None:
    """Through a pipeline, on either lane: stage and path are told, the rest of the micro-batch is unharmed."""
    (tmp_path / "cats").mkdir()
    good = example_photographs.jpeg(example_photographs.photograph("chelsea.png"))
    for number in range(12):
        cut_off = good[: len(good) // 2] + b"\0" * 9 + b"\xff\xd9"
        data = b"no picture" if number == 4 else cut_off if number == 9 else good
        (tmp_path / "cats" / f"{number:02}.jpg").write_bytes(data)

    photographs: Any = image_classification.ImageFolder(tmp_path)

    def make(**more: Any) -> Any:
        return DataLoader(
            photographs,
            3,
            num_workers=2,
            pipeline=image_classification.build(size=32),
            lanes=lanes,
            on_error="skip",
            generator=torch.Generator().manual_seed(3),
            **more,
        )

    loader = make()
    iterator = iter(loader)
    first = next(iterator)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    rest, again = list(iterator), list(resumed)
    stats = loader.stats()
    failures = {Path(bad["path"]).name: bad for bad in stats["failures"]}
    assert "04.jpg" in failures and failures["04.jpg"]["stage"] is not None
    assert failures["04.jpg"]["position"] == 4 and failures["04.jpg"]["epoch"] == 0
    assert len(first["label"]) + sum(len(batch["label"]) for batch in rest) == 12 - len(failures)
    assert stats["samples_failed"] == len(failures) == resumed.stats()["samples_failed"]
    for one, other in zip(rest, again, strict=True):
        assert torch.equal(one["label"], other["label"])
        assert torch.allclose(one["image"], other["image"], atol=0.1)


def test_what_was_left_out_is_in_the_order_log(tmp_path: Path) -> None:
    """A recorded order replays, the batches that lost samples included."""

    def run() -> Any:
        log = tmp_path / "order"
        loader = DataLoader(Made(40, broken), 4, num_workers=2, on_error="skip", in_order=False, order_log=log)
        return [batch.tolist() for batch in loader]

    assert run() == run()
