"""P6 with on_error: a bad sample is raised, tried again or left out, always counted, and takes nothing else with it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from minato_gpu import DataLoader, Pipeline, Stage
from minato_gpu.faults.failures import BadSample, FailurePolicy, TooManyFailures
from minato_gpu.lanes.base import failure
from minato_gpu.observe.telemetry import Telemetry
from minato_gpu.pipeline import Field, TorchFunction
from minato_gpu.sampling.delivered import DeliveredPositions
from pipelines import example_photographs, image_classification
from tests.contracts.datasets import Made
from tests.contracts.modes import BOUNDED_8, BY_PROCESSES, MINATO, Mode
from tests.raising import error_of, text_of

_FORK = multiprocessing.get_context("fork")
_BAD = (5, 6, 17, 30)
_GOOD = [index for index in range(40) if index not in _BAD]


def _broken(index: int) -> Any:
    if index in _BAD:
        raise ValueError(f"sample {index} is broken")
    return torch.tensor(index)


def _rarely_broken(index: int) -> Any:
    """Two that are broken are never in one window of 16, so never in one batch either."""
    if index % 25 == 5:
        raise ValueError(f"sample {index} is broken")
    return torch.tensor(index)


_COLLATE: dict[str, Callable[[Any], Any] | None] = {"stacked": None, "joined": list}


def _numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch]


@pytest.mark.parametrize("collate", _COLLATE)
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_skip(mode: Mode, workers: int, collate: str) -> None:
    loader = mode.loader(
        Made(40, _broken), 4, num_workers=workers, on_error="skip", collate_fn=_COLLATE[collate], shuffle=False
    )
    for _ in range(2):
        batches = list(loader)
        assert sorted(_numbers(batches)) == _GOOD
        assert len(batches) == 10
        if workers == 0 or not mode.lateness:
            assert _numbers(batches) == _GOOD
        stats = loader.stats()
        assert (stats["samples_delivered"], stats["samples_failed"], stats["samples_skipped"]) == (36, 4, 0)
        assert stats["samples_delivered"] + stats["samples_failed"] == stats["samples_expected"]
        told = [(bad["position"], bad["index"], bad["lane"], bad["error"]) for bad in stats["failures"]]
        assert sorted(told) == [(index, str(index), "cpu", "ValueError") for index in _BAD]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_batches_that_lose_everything(mode: Mode, workers: int) -> None:
    """They are left out: there is nothing to deliver, and no other rank that counts on them."""
    loader = mode.loader(Made(40, _broken), None, num_workers=workers, on_error="skip")
    assert sorted(int(number) for number in loader) == _GOOD
    assert loader.stats()["samples_failed"] == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_data_sets_that_fetch_many(workers: int) -> None:
    class Many(Made):
        def __getitems__(self, keys: list[int]) -> list[Any]:
            return [self.make(key) for key in keys]

    assert _numbers(DataLoader(Many(40, _broken), 4, num_workers=workers, on_error="skip")) == _GOOD


@pytest.mark.parametrize("workers", [0, 2])
def test_data_sets_that_fetch_fewer_than_they_are_asked_for(workers: int) -> None:
    """What is missing is counted; a batch of which nothing comes is an error where nothing may be left out."""

    class Fewer(Made):
        def __getitems__(self, keys: list[int]) -> list[Any]:
            return [self.make(key) for key in keys if not 8 <= key <= 12]

    loader = DataLoader(Fewer(40, torch.tensor), 4, num_workers=workers, on_error="skip")
    assert _numbers(loader) == [index for index in range(40) if not 8 <= index <= 12]
    stats = loader.stats()
    assert (stats["samples_delivered"], stats["samples_failed"]) == (35, 5)
    with pytest.raises((IndexError, ValueError)):
        list(DataLoader(Fewer(12, torch.tensor), 4, num_workers=workers))


@pytest.mark.parametrize("on_error", ["skip", "retry"])
@pytest.mark.parametrize("kind", ["process", "thread"])
@pytest.mark.parametrize("collate", _COLLATE)
def test_a_worker_that_cannot_start_is_not_its_samples_fault(kind: str, on_error: str, collate: str) -> None:
    def begin(worker: int) -> None:
        raise OSError("no disk")

    more: dict[str, Any] = {"worker_kind": kind, "on_error": on_error, "collate_fn": _COLLATE[collate]}
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
    loader = DataLoader(Made(40, _broken), 4, num_workers=workers, on_error=decide)
    with pytest.raises(ValueError, match="sample 17 is broken"):
        received.extend(int(number) for batch in loader for number in batch)
    assert received == [index for index in range(16) if index not in _BAD]
    assert [(bad.epoch, bad.position, bad.index, bad.error) for bad in seen] == [
        (0, 5, 5, "ValueError"),
        (0, 6, 6, "ValueError"),
        (0, 17, 17, "ValueError"),
    ]
    assert "raise ValueError" in seen[0].traceback and "_broken" in seen[0].traceback


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_is_refused_is_not_counted_as_delivered(workers: int) -> None:
    loader = DataLoader(Made(40, _broken), 4, num_workers=workers, on_error=lambda bad: "raise", shuffle=False)
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
            assert len(_numbers(loader)) == 400 - len(bad)
        else:
            with pytest.raises(TooManyFailures):
                list(loader)


def test_an_answer_that_means_nothing() -> None:
    with pytest.raises(ValueError, match="on_error returned None"):
        list(DataLoader(Made(40, _broken), 4, num_workers=1, on_error=lambda bad: None))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("workers", [0, 1])
def test_stop_iteration_of_on_error_does_not_end_the_loop_without_a_word(workers: int) -> None:
    def stop(bad: Any) -> str:
        raise StopIteration

    with pytest.raises(RuntimeError, match="on_error raised StopIteration"):
        list(DataLoader(Made(40, _broken), 4, num_workers=workers, on_error=stop))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("limit", "fits"), [(4, True), (3, False), (0.1, True), (0.05, False), (0, False)])
def test_the_budget(limit: float, fits: bool, workers: int) -> None:
    loader = DataLoader(Made(40, _broken), 4, num_workers=workers, on_error="skip", max_failures=limit)
    if fits:
        assert _numbers(loader) == _GOOD
    else:
        with pytest.raises(TooManyFailures, match="samples failed in this epoch, max_failures="):
            list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_retry(workers: int) -> None:
    """What fails once is tried again, unseen; what fails twice is raised."""
    tries = _FORK.Array("i", 40)

    def flaky(index: int) -> Any:
        tries[index] += 1
        if index in _BAD and tries[index] < 2:
            raise OSError("try again")
        return torch.tensor(index)

    loader = DataLoader(Made(40, flaky), 4, num_workers=workers, on_error="retry")
    assert _numbers(loader) == list(range(40))
    assert [tries[index] for index in _BAD] == [2, 2, 2, 2]
    with pytest.raises(ValueError, match="sample 5 is broken"):
        list(DataLoader(Made(40, _broken), 4, num_workers=workers, on_error="retry"))


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
        return BOUNDED_8.loader(Made(40, _broken), 4, num_workers=2, on_error="skip")

    for step in (2, 3, 6):
        loader = make()
        iterator = iter(loader)
        first = [next(iterator) for _ in range(step)]
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        assert sorted(_numbers([*first, *resumed])) == _GOOD
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
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DataLoader(Made(4, _broken), **arguments)


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


# --- samples that cannot be sent ---------------------------------------------------------------------------------


def _unsendable(index: int) -> Any:
    return (lambda: index) if index in _BAD else torch.tensor(index)


@pytest.mark.parametrize("collate", _COLLATE)
@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_a_sample_that_cannot_be_pickled_is_left_out_alone(mode: Mode, collate: str) -> None:
    loader = mode.loader(
        Made(40, _unsendable), 4, num_workers=2, on_error="skip", collate_fn=_COLLATE[collate], shuffle=False
    )
    for _ in range(2):
        assert sorted(_numbers(loader)) == _GOOD
        stats = loader.stats()
        assert (stats["samples_delivered"], stats["samples_failed"], stats["samples_skipped"]) == (36, 4, 0)
        told = [(bad["epoch"], bad["position"], bad["index"], bad["stage"], bad["lane"]) for bad in stats["failures"]]
        assert sorted(told) == [(told[0][0], index, str(index), "send", "cpu") for index in _BAD]


@pytest.mark.parametrize("collate", _COLLATE)
@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_the_error_of_a_sample_that_cannot_be_pickled_names_it(mode: Mode, collate: str) -> None:
    """Where ``default_collate`` itself refuses the sample, its own error is what PyTorch raises too."""
    data = Made(8, lambda index: (lambda: 1) if index == 5 else torch.tensor(index))
    text = text_of(error_of(Exception, list, mode.loader(data, 4, num_workers=1, collate_fn=_COLLATE[collate])))
    if "default_collate" not in text:
        for part in ("epoch 0", "position 5", "index 5", "stage 'send'", "lane cpu"):
            assert part in text, text


@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_samples_that_a_collate_function_makes_sendable_are_fine(mode: Mode) -> None:
    """And what really fails among them is left out, though one worker must prepare each batch."""

    def make(index: int) -> Any:
        return _broken(index), lambda: index

    def collate(samples: list[Any]) -> Any:
        return [int(value) + 100 * function() for value, function in samples]

    loader = mode.loader(Made(40, make), 4, num_workers=2, on_error="skip", collate_fn=collate)
    assert sorted(_numbers(loader)) == [101 * index for index in _GOOD]
    assert loader.stats()["samples_failed"] == 4


@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_batches_whose_samples_can_none_of_them_be_sent(mode: Mode) -> None:
    loader = mode.loader(Made(8, lambda index: lambda: index), 2, num_workers=1, collate_fn=list, on_error="skip")
    assert list(loader) == []
    assert loader.stats()["samples_failed"] == 8


@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_a_tensor_with_a_history(mode: Mode) -> None:
    """It requires grad and is not a leaf: it cannot leave its worker."""

    def make(index: int) -> Any:
        value = torch.full((), float(index))
        return value.requires_grad_() * 1 if index in _BAD else value

    loader = mode.loader(Made(40, make), 4, num_workers=2, on_error="skip")
    assert sorted(_numbers(loader)) == _GOOD
    assert {bad["stage"] for bad in loader.stats()["failures"]} == {"send"}


class _Unloadable:
    """Can be sent, and not be loaded."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> Any:
        return _cannot_be_loaded, (self.index,)


def _cannot_be_loaded(index: int) -> Any:
    raise ValueError(f"{index} cannot be loaded")


@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_samples_that_no_other_worker_can_load(mode: Mode) -> None:
    """The worker that joins their batch prepares them, and what a collate function makes of them is fine.

    What was prepared twice is counted. How much that is depends: where one worker prepares all of a batch, nothing is.
    """
    prepared = _FORK.Array("i", 40)

    def make(index: int) -> Any:
        with prepared.get_lock():
            prepared[index] += 1
        return _Unloadable(index) if index in _BAD else torch.tensor(index)

    def collate(samples: list[Any]) -> Any:
        return [sample.index if isinstance(sample, _Unloadable) else int(sample) for sample in samples]

    loader = mode.loader(Made(40, make), 4, num_workers=2, collate_fn=collate)
    assert sorted(_numbers(loader)) == list(range(40))
    assert loader.stats()["samples_repeated"] == sum(prepared[index] for index in range(40)) - 40


def _raises_what_only_it_knows(index: int) -> Any:
    module = ModuleType("made_in_a_worker")
    sys.modules[module.__name__] = module
    exec("class Unknown(Exception): pass", module.__dict__)
    raise module.Unknown("the reason")


@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_errors_of_a_class_that_only_workers_know(mode: Mode) -> None:
    data = Made(40, lambda index: _raises_what_only_it_knows(index) if index in _BAD else torch.tensor(index))
    loader = mode.loader(data, 4, num_workers=2, on_error="skip")
    assert sorted(_numbers(loader)) == _GOOD
    assert loader.stats()["samples_failed"] == 4
    with pytest.raises(RuntimeError, match=r"(?s)Unknown, whose class cannot be loaded here.*the reason"):
        list(mode.loader(data, 4, num_workers=2))


def test_a_collate_function_that_fails_is_not_its_samples_fault() -> None:
    def collate(samples: list[Any]) -> Any:
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        list(DataLoader(Made(8, _unsendable), 2, num_workers=1, collate_fn=collate, on_error="skip"))


# --- exceptions of other kinds -----------------------------------------------------------------------------------

_WORKERS: dict[str, dict[str, Any]] = {
    "main": {"num_workers": 0},
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "worker_kind": "thread"},
}


def _stops(index: int) -> Any:
    """A data set's own ``next`` that finds nothing."""
    return torch.tensor(index) if index != 17 else next(iter(()))


class _ManyStop(Made):
    def __getitems__(self, keys: list[int]) -> list[Any]:
        return [self.make(key) for key in keys]


@pytest.mark.parametrize("kind", [Made, _ManyStop], ids=["one by one", "many"])
@pytest.mark.parametrize("workers", _WORKERS)
def test_stop_iteration_of_a_sample_does_not_end_the_epoch(workers: str, kind: type[Made]) -> None:
    """As in a generator, it is the cause of a RuntimeError, which names the index."""
    iterator = iter(DataLoader(kind(40, _stops), 4, **_WORKERS[workers]))
    before = [next(iterator).tolist() for _ in range(4)]
    with pytest.raises(RuntimeError, match=r"StopIteration.*(index 17|indices \[16, 17, 18, 19\])") as caught:
        next(iterator)
    assert isinstance(caught.value.__cause__, StopIteration)
    after = [batch.tolist() for batch in iterator]
    assert before + after == [list(range(lo, lo + 4)) for lo in range(0, 40, 4) if lo != 16]


@pytest.mark.parametrize("workers", _WORKERS)
def test_stop_iteration_of_a_sample_that_is_left_out(workers: str) -> None:
    loader = DataLoader(Made(40, _stops), 4, on_error="skip", **_WORKERS[workers])
    assert _numbers(loader) == [index for index in range(40) if index != 17]
    assert [(bad["index"], bad["error"]) for bad in loader.stats()["failures"]] == [("17", "StopIteration")]


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(40))


def _cannot_begin(worker: int) -> None:
    raise StopIteration("no start")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [range(40), _Stream()], ids=["map-style", "iterable"])
def test_stop_iteration_of_a_collate_function_does_not_end_the_epoch(data: Any, workers: int) -> None:
    def collate(samples: list[int]) -> list[int]:
        return samples if 17 not in samples else next(iter(()))

    iterator = iter(DataLoader(data, 4, num_workers=workers, collate_fn=collate))
    before = [next(iterator) for _ in range(4)]
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(iterator)
    assert [*before, *iterator] == [list(range(lo, lo + 4)) for lo in range(0, 40, 4) if lo != 16]


class _NoStart(_Stream):
    def __iter__(self) -> Any:
        return iter([next(iter(()))])


@pytest.mark.parametrize("data", [_Stream(), _NoStart()], ids=["worker_init_fn", "iter()"])
def test_stop_iteration_of_a_stream_that_cannot_begin_is_no_empty_stream(data: Any) -> None:
    begin = None if isinstance(data, _NoStart) else _cannot_begin
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(DataLoader(data, 4, num_workers=1, worker_init_fn=begin))


class _Several(Exception):
    message = "of the class: its constructor takes none"


class _Fixed(Exception):
    """Says the same, whatever it is given."""

    def __init__(self, *_: Any) -> None:
        super().__init__("fixed")


class _Mute(Exception):
    """Its ``str`` needs more than a text."""

    def __init__(self, answer: Any) -> None:
        super().__init__(answer)
        self.answer = answer

    def __str__(self) -> str:
        return f"status {self.answer.status}"


_KINDS: dict[str, tuple[Callable[[], Exception], type[Exception]]] = {
    "a group": (lambda: ExceptionGroup("several", [ValueError("the reason")]), RuntimeError),
    "a message of the class": (lambda: _Several("the reason"), RuntimeError),
    "a text of its own": (lambda: _Fixed("the reason"), _Fixed),
    "without a text": (lambda: _Mute(torch.zeros(1)), _Mute),
    "of the codec": (lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "the reason"), RuntimeError),
}


@pytest.mark.parametrize("workers", ["processes", "threads"])
@pytest.mark.parametrize("kind", _KINDS)
def test_exceptions_that_cannot_be_made_of_a_text(kind: str, workers: str) -> None:
    """Their class, or a RuntimeError in its place; name, place and original traceback are there in any case."""
    make, arrives = _KINDS[kind]

    def raises_here(index: int) -> Any:
        if index == 17:
            raise make()
        return torch.tensor(index)

    with pytest.raises(arrives) as caught:
        list(DataLoader(Made(40, raises_here), 4, **_WORKERS[workers]))
    assert type(caught.value) is arrives
    notes = "\n".join(getattr(caught.value, "__notes__", ()))
    text = notes if "Caught" in notes else str(caught.value)
    for part in (f"Caught {type(make()).__name__} in DataLoader worker", "index 17", "in raises_here"):
        assert part in text
    assert "the reason" in text or kind in ("a text of its own", "without a text")


@dataclass(frozen=True)
class _Frozen(Exception):
    """Takes no notes."""

    code: int


def test_errors_without_workers_keep_their_cause_and_may_refuse_notes() -> None:
    def make(index: int) -> Any:
        try:
            return dict[int, int]()[index]
        except KeyError as error:
            raise _Frozen(index) from error

    with pytest.raises(_Frozen) as caught:
        list(DataLoader(Made(4, make), 2, num_workers=0))
    assert caught.value.code == 0 and isinstance(caught.value.__cause__, KeyError)


def test_what_was_left_out_is_in_the_order_log(tmp_path: Path) -> None:
    """A recorded order replays, the batches that lost samples included."""

    def run() -> Any:
        log = tmp_path / "order"
        loader = DataLoader(Made(40, _broken), 4, num_workers=2, on_error="skip", in_order=False, order_log=log)
        return [batch.tolist() for batch in loader]

    assert run() == run()


# --- the budget over a resume ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_the_budget_counts_on_after_a_resume(mode: Mode, workers: int) -> None:
    """Three may be left out, and the fourth comes after the resume: with its count it is one too many."""

    def make() -> Any:
        return mode.loader(
            Made(100, _rarely_broken), 4, num_workers=workers, on_error="skip", max_failures=3, shuffle=False
        )

    loader = make()
    iterator = iter(loader)
    while loader._session.progress is None or loader._session.progress.source.delivered.failed < 3:
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["progress"]["failed"] == 3
    assert loader.state_dict(ahead=loader._session.progress.source.delivered.batches)["progress"].get("failed") is None
    resumed = make()
    resumed.load_state_dict(state)
    text = str(error_of(TooManyFailures, list, resumed))
    assert "4 samples failed in this epoch, max_failures=3" in text
    del state["progress"]["failed"]  # as states were before they told it
    resumed = make()
    resumed.load_state_dict(state)
    assert len(_numbers(resumed)) + 3 + 1 <= 100
    assert len(_numbers(_lenient(make()))) == 96, "the next epoch counts from nothing"


def _lenient(loader: Any) -> Any:
    loader.max_failures = None
    return loader


@pytest.mark.parametrize("workers", [0, 1])
def test_the_budget_counts_what_a_caught_error_had_left_out(workers: int) -> None:
    def make() -> Any:
        return DataLoader(Made(40, _broken), 4, num_workers=workers, on_error="skip", max_failures=1)

    loader = make()
    iterator = iter(loader)
    next(iterator)
    error_of(TooManyFailures, next, iterator)  # 5 and 6 are in one batch
    assert "failed" not in loader.state_dict()["progress"], "the consumer has not gone on: the batch comes once more"
    next(iterator)
    assert loader.state_dict()["progress"]["failed"] == 2


def test_a_share_of_what_has_been_seen_counts_what_was_seen_before() -> None:
    """Of an unknown number: 4 of 100 before, and now the fifth of 101 and the sixth of 102."""
    bad = failure(ValueError("broken"), "here")
    policy = FailurePolicy("skip", 0.05, None, Telemetry(None, 0.0), DeliveredPositions(25, 100, failed=4))
    policy.take([bad], 0)
    assert policy.count == 5
    with pytest.raises(TooManyFailures, match="6 samples failed"):
        policy.take([bad], 0)
