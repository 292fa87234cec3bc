"""order_log: an out-of-order run is recorded, and a replay gives exactly the same batches."""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from minato_gpu import DataLoader
from tests.contracts.datasets import Made, draw, rows
from tests.contracts.modes import BOUNDED, BOUNDED_8, IN_ORDER, Mode
from tests.support.raising import error_of

_FORK = multiprocessing.get_context("fork")


def _loader(mode: Mode, log: Path, make: Any, workers: int = 2, length: int = 60, **arguments: Any) -> Any:
    generator = torch.Generator().manual_seed(4)
    extra = {"sampler": [(7 + 13 * index) % length for index in range(length)], **arguments}
    return mode.loader(Made(length, make), 4, num_workers=workers, generator=generator, order_log=log, **extra)


@pytest.mark.parametrize("stays", [{"persistent_workers": True}, {"epochs": 3}], ids=lambda stays: next(iter(stays)))
def test_what_is_recorded_replays_whole_where_a_next_epoch_would_be_prepared(
    tmp_path: Path, stays: dict[str, Any]
) -> None:
    """It is missed by who asks for it, not in the middle of the epoch before."""
    log = tmp_path / "order.log"
    arguments = {**stays, "sampler": None, "shuffle": True}
    recorded = [rows([batch]) for batch in _loader(BOUNDED_8, log, draw, **arguments)]
    loader = _loader(BOUNDED_8, log, draw, **arguments)
    assert [rows([batch]) for batch in loader] == recorded
    assert "has no epoch 1" in str(error_of(ValueError, list, loader))


def test_ranks_that_record_to_one_file_are_told(tmp_path: Path) -> None:
    """Nobody could replay it."""
    log = tmp_path / "order.log"
    data = Made(40, draw)
    ranks = [
        BOUNDED_8.loader(data, 4, num_workers=1, sampler=DistributedSampler(data, 2, rank), order_log=log)
        for rank in range(2)
    ]
    iterators = [iter(loader) for loader in ranks]
    next(iterators[0])
    assert "pass each a file of its own" in str(error_of(ValueError, next, iterators[1]))
    assert len(list(iterators[0])) == 4


@pytest.mark.parametrize(
    "copied", [copy.copy, lambda loader: pickle.loads(pickle.dumps(loader))], ids=["copy", "pickle"]
)
def test_a_copy_that_records_to_the_same_file_is_told_so(tmp_path: Path, copied: Any) -> None:
    loader = _loader(BOUNDED_8, tmp_path / "order.log", draw)
    again = copied(loader)
    next(iter(loader))
    assert "a copy of this one, pickled or in a forked process" in str(error_of(ValueError, next, iter(again)))


@pytest.mark.parametrize("how", ["moved", "emptied"])
def test_a_log_that_is_put_away_between_epochs_begins_anew(tmp_path: Path, how: str) -> None:
    log = tmp_path / "order.log"
    loader = _loader(BOUNDED_8, log, draw)
    list(loader)
    if how == "moved":
        log.rename(tmp_path / "before.log")
    else:
        log.write_bytes(b"")
    assert len(list(loader)) == 15
    assert [json.loads(line)["epoch"] for line in log.read_text().splitlines()] == [1] * 15


def test_a_log_that_is_cut_off_is_told(tmp_path: Path) -> None:
    """No other loader is blamed for it."""
    log = tmp_path / "order.log"
    loader = _loader(BOUNDED_8, log, draw)
    list(loader)
    log.write_bytes(log.read_bytes()[:20])
    assert "was cut off, or another put in its place" in str(error_of(ValueError, list, loader))


def test_what_is_no_plain_file_is_recorded_to_all_the_same() -> None:
    loader = _loader(BOUNDED_8, Path("/dev/null"), draw)
    assert [len(list(loader)) for _ in range(2)] == [15, 15]


class _Disordered:
    """Holds sample 7, the sampler's first, back until the consumer has seen as many batches as the lateness allows."""

    def __init__(self) -> None:
        self.gate = _FORK.Event()

    def __call__(self, index: int) -> Any:
        if index == 7:
            assert self.gate.wait(50), "the test never let it go"
        return draw(index)


def _recorded(mode: Mode, log: Path, epochs: int = 2) -> list[list[Any]]:
    make = _Disordered()
    loader = _loader(mode, log, make)
    batches = []
    for _ in range(epochs):
        make.gate.clear()
        iterator = iter(loader)
        batches += [next(iterator) for _ in range(mode.lateness)]
        make.gate.set()
        batches += list(iterator)
    return [rows([batch]) for batch in batches]


def test_replay_of_a_shuffled_run(tmp_path: Path) -> None:
    """The order itself comes from the generator; three epochs."""
    log = tmp_path / "order.log"

    def run() -> list[Any]:
        loader = _loader(BOUNDED_8, log, draw, sampler=None, shuffle=True)
        return [rows([batch]) for _ in range(3) for batch in loader]

    assert run() == run()


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("mode", BOUNDED[:2], ids=lambda mode: mode.name)
def test_replay_gives_the_same_batches(mode: Mode, workers: int, tmp_path: Path) -> None:
    """Composition, order and content; two epochs, with any number of workers, where nothing is held back any more."""
    log = tmp_path / "order.log"
    recorded = _recorded(mode, log)
    text = log.read_bytes()
    loader = _loader(mode, log, draw, workers)
    replayed = [rows([batch]) for _ in range(2) for batch in loader]
    assert replayed == recorded
    assert log.read_bytes() == text


def test_the_recorded_run_was_out_of_order(tmp_path: Path) -> None:
    """Without this the test above would prove nothing."""
    recorded = _recorded(BOUNDED_8, tmp_path / "order.log", epochs=1)
    generator = torch.Generator().manual_seed(4)
    sampler = [(7 + 13 * index) % 60 for index in range(60)]
    in_order = IN_ORDER.loader(Made(60, draw), 4, sampler=sampler, num_workers=2, generator=generator)
    batches = [rows([batch]) for batch in in_order]
    assert recorded != batches
    assert sorted(row for batch in recorded for row in batch) == sorted(row for batch in batches for row in batch)


def test_replay_with_threads(tmp_path: Path) -> None:
    log = tmp_path / "order.log"
    recorded = [[row[0] for row in batch] for batch in _recorded(BOUNDED_8, log, epochs=1)]
    threads = _loader(BOUNDED[3], log, lambda index: [index])
    assert [batch[0].tolist() for batch in threads] == recorded


def test_replay_with_repeated_indices(tmp_path: Path) -> None:
    log = tmp_path / "order.log"
    repeated: dict[str, Any] = {"sampler": [index % 6 for index in range(40)]}

    def run() -> list[Any]:
        return [rows([batch]) for batch in _loader(BOUNDED_8, log, draw, **repeated)]

    assert run() == run()


def test_a_log_of_another_data_set_is_refused(tmp_path: Path) -> None:
    """Never silently another order: too short, too long, and epochs that were never recorded."""
    log = tmp_path / "order.log"
    list(_loader(BOUNDED_8, log, draw))
    for length in (59, 61, 20):
        text = str(error_of(ValueError, list, _loader(BOUNDED_8, log, draw, length=length)))
        assert "order_log" in text
    loader = _loader(BOUNDED_8, log, draw)
    list(loader)
    assert "order_log" in str(error_of(ValueError, list, loader))


@pytest.mark.parametrize("content", [b"this is no log\n", b"\x89PNG\r\n"], ids=["text", "binary"])
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, content: bytes) -> None:
    log = tmp_path / "order.log"
    log.write_bytes(content)
    with pytest.raises(ValueError, match="order_log"):
        _loader(BOUNDED_8, log, draw)
    assert log.read_bytes() == content


def test_what_was_left_out_or_raised_is_part_of_the_order(tmp_path: Path) -> None:
    """Recorded or not, the bad samples are the sampler's: a replay leaves out the same, or raises at the same place."""

    def make(index: int) -> Any:
        if index in (5, 8, 9, 10, 11):
            raise ValueError(f"sample {index} is broken")
        return torch.tensor(index)

    for on_error in ("skip", "raise"):
        runs = []
        for _ in range(2):
            loader = DataLoader(
                Made(40, make), 4, num_workers=1, in_order=False, order_log=tmp_path / on_error, on_error=on_error
            )
            runs.append(_outcomes(loader))
        assert runs[0] == runs[1]
        wanted = 35 if on_error == "skip" else 32
        assert sum(len(batch) for batch in runs[0] if isinstance(batch, list)) == wanted


def _outcomes(loader: Any) -> list[Any]:
    """Each batch, or the last line of the error in its place."""
    iterator, out = iter(loader), []
    while True:
        try:
            out.append(next(iterator).tolist())
        except StopIteration:
            return out
        except ValueError as error:
            out.append(str(error).splitlines()[-1])
