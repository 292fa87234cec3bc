"""P6 and bad input: clear errors that say where, and nothing else is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import minato_gpu
from tests.contracts.checks import NOTHING, differences
from tests.contracts.datasets import Made, Streams
from tests.contracts.modes import BY_PROCESSES, IN_ORDER, MINATO, Mode
from tests.support.leaks import no_child_stays
from tests.support.raising import error_of, text_of

_DATA = Made(8, torch.tensor)

_CONTRADICTIONS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "max_lateness in order": (_DATA, {"max_lateness": 4}, "max_lateness"),
    "max_lateness explicitly in order": (_DATA, {"max_lateness": 4, "in_order": True}, "max_lateness"),
    "max_lateness negative": (_DATA, {"max_lateness": -1, "in_order": False}, "max_lateness"),
    "host budget 0": (_DATA, {"host_memory_budget": 0}, "host_memory_budget"),
    "host budget negative": (_DATA, {"host_memory_budget": -5}, "host_memory_budget"),
    "device budget 0": (_DATA, {"device_memory_budget": 0}, "device_memory_budget"),
    "device budget negative": (_DATA, {"device_memory_budget": -1}, "device_memory_budget"),
    "unknown lane": (_DATA, {"lanes": ("cpu", "quantum")}, "lanes"),
    "no lane": (_DATA, {"lanes": ()}, "lanes"),
    "device lane without a pipeline": (_DATA, {"lanes": ("device",)}, "lanes"),
    "unknown worker kind": (_DATA, {"worker_kind": "fibre"}, "worker_kind"),
    "no worker kind": (_DATA, {"worker_kind": None}, "worker_kind"),
    "threads with a context": (_DATA, {"worker_kind": "thread", "multiprocessing_context": "fork"}, "worker_kind"),
    "no epochs": (_DATA, {"epochs": 0}, "epochs"),
    "negative epochs": (_DATA, {"epochs": -2}, "epochs"),
}


@pytest.mark.parametrize("case", _CONTRADICTIONS)
def test_contradicting_arguments(case: str) -> None:
    data, arguments, name = _CONTRADICTIONS[case]
    with pytest.raises(ValueError, match=name):
        minato_gpu.DataLoader(data, num_workers=1, **arguments)


def test_pipeline_with_a_stream() -> None:
    with pytest.raises(ValueError, match="pipeline"):
        minato_gpu.DataLoader(Streams([3]), pipeline=_pipeline())


def test_threads_cannot_share_a_stream() -> None:
    with pytest.raises(ValueError, match="worker_kind"):
        minato_gpu.DataLoader(Streams([3, 3]), num_workers=2, worker_kind="thread")


def test_pipeline_that_is_no_pipeline() -> None:
    with pytest.raises((TypeError, ValueError), match="pipeline"):
        minato_gpu.DataLoader(_DATA, pipeline="resize")  # type: ignore[arg-type]


def _pipeline() -> minato_gpu.Pipeline:
    from pipelines import image_classification

    return image_classification.pipeline()


@pytest.mark.parametrize("argument", ["host_memory_budget", "max_lateness", "epochs"])
@pytest.mark.parametrize("value", ["4", 1.5, True])
def test_arguments_that_are_no_whole_numbers(argument: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=argument):
        minato_gpu.DataLoader(_DATA, num_workers=1, in_order=False, **{argument: value})


def test_new_arguments_are_kept_under_their_names() -> None:
    given: dict[str, Any] = {
        "max_lateness": 3,
        "host_memory_budget": 10_000,
        "device_memory_budget": 20_000,
        "lanes": ("cpu",),
        "worker_kind": "thread",
        "device": "cpu",
        "epochs": 2,
    }
    loader = minato_gpu.DataLoader(_DATA, num_workers=1, in_order=False, **given)
    assert {name: vars(loader)[name] for name in given} == given
    assert (vars(loader)["pipeline"], vars(loader)["order_log"]) == (None, None)


def _fails(*bad: int) -> Callable[[int], Any]:
    def make(index: int) -> Any:
        if index in bad:
            raise ValueError(f"sample {index} is broken")
        return torch.tensor(index)

    return make


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_an_error_says_where(mode: Mode, workers: int) -> None:
    """Epoch 1, because epoch 0 has another order; the index is not its position."""
    order = list(range(30))
    loader = mode.loader(Made(30, _fails(99)), 4, sampler=order, num_workers=workers)
    assert len(list(loader)) == 8
    order.remove(20)
    order.insert(17, 99)
    text = text_of(error_of(ValueError, list, loader))
    for part in ("sample 99 is broken", "epoch 1", "position 17", "index 99", "lane cpu"):
        assert part in text, text


@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_bad_samples_lose_their_batches_only_and_are_counted(mode: Mode) -> None:
    loader = mode.loader(Made(40, _fails(5, 6, 30)), 4, num_workers=2)
    iterator, received, errors = iter(loader), [], []
    while True:
        try:
            received += next(iterator).tolist()
        except StopIteration:
            break
        except ValueError as error:
            errors.append(str(error).splitlines()[-1])
    stats = loader.stats()
    lost = set(range(40)) - set(received)
    assert {5, 6, 30} <= lost and len(received) == len(set(received))
    assert len(errors) == len(lost) // 4 <= 3
    assert stats["samples_delivered"] == len(received)
    assert 0 < stats["samples_failed"] <= 3


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_a_collate_function_that_fails(mode: Mode, workers: int) -> None:
    calls: list[int] = []
    texts: list[str] = []

    def collate(samples: list[Any]) -> Any:
        if any(int(sample) == 9 for sample in samples):
            raise ArithmeticError("cannot collate this")
        return torch.stack(samples)

    iterator = iter(mode.loader(Made(40, torch.tensor), 4, num_workers=workers, collate_fn=collate))
    while True:
        try:
            calls += next(iterator).tolist()
        except StopIteration:
            break
        except ArithmeticError as error:
            texts.append(text_of(error))
    assert len(texts) == 1 and "cannot collate this" in texts[0] and "epoch 0" in texts[0], texts
    missing = differences(range(40), calls)
    assert missing["extra"] == [] and len(missing["missing"]) == 4 and 9 in missing["missing"]


@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_unequal_shapes(mode: Mode) -> None:
    planned = [list(range(start, start + 4)) for start in range(0, 40, 4)]
    data = Made(40, lambda index: torch.full((3 if index != 21 else 5,), index))
    iterator = iter(mode.loader(data, batch_sampler=planned, num_workers=2))
    received, errors = [], []
    while True:
        try:
            received.append(next(iterator)[:, 0].tolist())
        except StopIteration:
            break
        except RuntimeError as error:
            errors.append(str(error))
    assert len(errors) == 1 and "[3]" in errors[0] and "[5]" in errors[0]
    assert "need a collate_fn that pads them" in errors[0]
    expected = [tuple(batch) for batch in planned if 21 not in batch]
    assert differences(expected, map(tuple, received)) == NOTHING


class LocalErrors(IterableDataset[Any]):
    """A stream that fails at its third sample."""

    def __iter__(self) -> Any:
        yield torch.tensor(0)
        yield torch.tensor(1)
        raise ValueError("the stream broke")


@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_a_stream_that_breaks(mode: Mode) -> None:
    iterator = iter(mode.loader(LocalErrors(), None, num_workers=1))
    assert [int(next(iterator)), int(next(iterator))] == [0, 1]
    text = text_of(error_of(ValueError, next, iterator))
    assert "the stream broke" in text and "epoch 0" in text and "lane cpu" in text
    assert list(iterator) == []


@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_a_batch_that_cannot_be_pickled_is_an_error(mode: Mode) -> None:
    """PyTorch hangs here for ever."""
    loader = mode.loader(Made(8, lambda index: lambda: index), 2, num_workers=1, collate_fn=list)
    text = str(error_of(Exception, list, loader))
    assert "pickle" in text


@pytest.mark.parametrize("mode", BY_PROCESSES, ids=lambda mode: mode.name)
def test_an_error_of_a_local_class_is_an_error(mode: Mode) -> None:
    """PyTorch hangs here for ever: the class cannot be pickled."""

    class Local(Exception):
        pass

    def make(index: int) -> Any:
        raise Local("of my own kind")

    assert "of my own kind" in str(error_of(Exception, list, mode.loader(Made(8, make), 2, num_workers=1)))


def test_a_data_set_that_cannot_be_pickled_for_spawn() -> None:
    loader = IN_ORDER.loader(Made(8, lambda index: index), 2, num_workers=2, multiprocessing_context="spawn")
    with no_child_stays(), pytest.warns(UserWarning, match="pickle"):
        error_of(Exception, iter, loader)


@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_a_lock_in_the_data_set_is_fine_under_fork(mode: Mode) -> None:
    lock = threading.Lock()

    def make(index: int) -> Any:
        with lock:
            return torch.tensor(index)

    received = [int(n) for batch in mode.loader(Made(20, make), 4, num_workers=2) for n in batch]
    assert differences(range(20), received) == NOTHING
