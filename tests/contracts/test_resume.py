"""P1 and P2 across save and resume: every step of an epoch, every mode, other workers, fresh processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.scheduling import replay
from tests.contracts import resume_program
from tests.contracts.checks import lateness
from tests.contracts.datasets import Costly, Made, draw, rows
from tests.contracts.modes import BOUNDED_1, BOUNDED_8, BOUNDED_8_THREADS, IN_ORDER, MINATO, Mode
from tests.contracts.resuming import generator, interrupted, saves_along, sorted_samples, through_json
from tests.support import programs

_BATCH = 4
_SAMPLES = 48


# --- every step of an epoch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "persistent"),
    [*((mode, False) for mode in MINATO if mode is not BOUNDED_1), (IN_ORDER, True), (BOUNDED_8_THREADS, True)],
    ids=lambda value: value.name if isinstance(value, Mode) else "persistent" if value else "anew",
)
def test_every_step(mode: Mode, persistent: bool) -> None:
    """Two epochs, saved after any number of batches of the first (with processes, an even one, and out of order a
    multiple of four): nothing twice, nothing lost, the same content. With processes every third is followed by the
    second epoch, for either number of workers."""

    def make(workers: int = 2) -> Any:
        arguments: dict[str, Any] = {"persistent_workers": persistent, "shuffle": True, "generator": generator()}
        return mode.loader(Made(_SAMPLES, draw), _BATCH, num_workers=workers, **arguments)

    def content(batch: Any) -> list[Any]:
        return rows([batch]) if mode.processes else batch[0].tolist()

    whole = make()
    reference = [[content(batch) for batch in whole] for _ in range(2)]
    stride = (4 if mode.lateness else 2) if mode.processes else 1  # forks cost most of the time
    for number, (first, state) in enumerate(saves_along(make(), stride)):
        resumed = make(1 + number % 2)
        resumed.load_state_dict(state)
        epoch = [content(batch) for batch in (*first, *resumed)]
        if mode.lateness:
            assert sorted_samples(epoch) == sorted_samples(reference[0])
            assert [len(batch) for batch in epoch] == [_BATCH] * (_SAMPLES // _BATCH)
        else:
            assert epoch == reference[0]
        if mode.processes and number % 3:
            continue
        following = [content(batch) for batch in resumed]
        if mode.lateness:
            assert sorted_samples(following) == sorted_samples(reference[1])
        else:
            assert following == reference[1]


@pytest.mark.parametrize("arguments", [{"epochs": 4, "persistent_workers": True}, {"epochs": 4}], ids=str)
@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8], ids=lambda mode: mode.name)
def test_later_epochs_that_overlap(mode: Mode, arguments: dict[str, Any]) -> None:
    """Saved in the second of four epochs, whose first samples were prepared during the first; in order after an even
    number of its batches, out of order after an odd one."""

    def make() -> Any:
        return mode.loader(Made(24, draw), 4, num_workers=2, shuffle=True, generator=generator(), **arguments)

    def content(batches: Any) -> Any:
        samples = [rows([batch]) for batch in batches]
        return sorted_samples(samples) if mode.lateness else samples

    whole = make()
    reference = [content(whole) for _ in range(4)]
    loader = make()
    list(loader)
    for first, state in saves_along(loader)[mode.lateness > 0 :: 2]:
        assert state["epoch"] == 1
        resumed = make()
        resumed.load_state_dict(state)
        rest = list(resumed)
        assert content([*first, *rest]) == reference[1]
        stats = resumed.stats()
        assert stats["samples_expected"] == stats["samples_delivered"] == 24 - 4 * len(first)
        assert [content(resumed) for _ in range(2)] == reference[2:]


@pytest.mark.parametrize("mode", [mode for mode in MINATO if mode.lateness], ids=lambda mode: mode.name)
def test_lateness_counts_across_a_resume(mode: Mode) -> None:
    """P3 holds for the whole epoch, also where it was saved with samples overtaken: slow ones come first here."""
    order = sorted(range(60), key=lambda index: index % 7 != 3)

    def make() -> Any:
        return mode.loader(Costly(60), _BATCH, sampler=order, num_workers=2)

    for first, state in saves_along(make(), 3):
        resumed = make()
        resumed.load_state_dict(state)
        batches = [batch.tolist() for batch in (*first, *resumed)]
        assert sorted_samples(batches) == list(range(60))
        assert max(lateness(order, batches, _BATCH)) <= mode.lateness
        assert resumed.stats()["lateness"]["max"] <= mode.lateness
        assert len(state["progress"]["above"]) * 6 <= 8 * 60 + 24  # a bit for a sample, in base64


@pytest.mark.parametrize("mode", MINATO, ids=lambda mode: mode.name)
def test_resumed_again_and_again(mode: Mode) -> None:
    """A new loader for every batch."""

    def make() -> Any:
        return mode.loader(Costly(30), _BATCH, num_workers=2, shuffle=True, generator=generator())

    state: Any = {}
    received: list[int] = []
    for _ in range(8):
        loader = make()
        loader.load_state_dict(state)
        received += next(iter(loader)).tolist()
        state = through_json(loader.state_dict())
    assert sorted(received) == list(range(30))
    if not mode.lateness:
        assert received == [int(index) for batch in make() for index in batch]


# --- what may differ ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"num_workers": 1}, {"num_workers": 3}, {"in_order": False}, {"prefetch_factor": 5}]
)
def test_other_workers_after_the_resume(change: dict[str, Any]) -> None:
    def make(**more: Any) -> Any:
        arguments = {"num_workers": 2, "shuffle": True, "generator": generator(), **more}
        return DataLoader(Made(40, draw), 4, **arguments)

    reference = [rows([batch]) for batch in make()]
    loader = make()
    iterator = iter(loader)
    first = [rows([next(iterator)]) for _ in range(3)]
    resumed = make(**change)
    resumed.load_state_dict(loader.state_dict())
    rest = [rows([batch]) for batch in resumed]
    assert sorted_samples(first + rest) == sorted_samples(reference)
    if resumed.in_order:
        assert first + rest == reference


def test_from_workers_to_none_and_back() -> None:
    def make(workers: int) -> Any:
        return DataLoader(Costly(40), 4, num_workers=workers, shuffle=True, generator=generator())

    order = [batch.tolist() for batch in make(2)]
    state: Any = {}
    received = []
    for turn in range(5):
        loader = make(2 if turn % 2 else 0)
        loader.load_state_dict(state)
        iterator = iter(loader)
        received += [next(iterator).tolist() for _ in range(2)]
        state = through_json(loader.state_dict())
    assert received == order


def test_loading_into_a_loader_that_runs() -> None:
    """The same object, its iterator alive, workers kept: it goes back to where the state says."""
    loader = DataLoader(Made(40, draw), 4, num_workers=2, shuffle=True, generator=generator(), persistent_workers=True)
    iterator = iter(loader)
    first = [rows([next(iterator)]) for _ in range(3)]
    state = loader.state_dict()
    rest = [rows([next(iterator)]) for _ in range(5)]
    loader.load_state_dict(state)
    again = [rows([batch]) for batch in loader]
    assert again[:5] == rest and len(first) + len(again) == 10
    following = [rows([batch]) for batch in loader]
    whole = DataLoader(Made(40, draw), 4, num_workers=2, shuffle=True, generator=generator(), persistent_workers=True)
    assert [first + again, following] == [[rows([batch]) for batch in whole] for _ in range(2)]


@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8], ids=lambda mode: mode.name)
def test_recorded_events_of_a_resumed_run_replay(mode: Mode, tmp_path: Path) -> None:
    for step in (1, 6):
        _, _, resumed = interrupted(lambda: mode.loader(Costly(60), 4, num_workers=2), step)
        resumed.record_events(tmp_path / f"{step}.jsonl")
        assert sum(len(batch) for batch in resumed) == 60 - 4 * step
        assert replay.verify((tmp_path / f"{step}.jsonl").read_text().splitlines()) > 0


# --- when it is saved --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_before_between_and_at_the_end_of_epochs(workers: int, persistent: bool) -> None:
    persistent = persistent and workers > 0

    def make() -> Any:
        return DataLoader(
            Made(12, draw if workers else torch.tensor),
            4,
            num_workers=workers,
            shuffle=True,
            generator=generator(),
            persistent_workers=persistent,
        )

    def content(batch: Any) -> Any:
        return rows([batch]) if workers else batch.tolist()

    whole = make()
    reference = [[content(batch) for batch in whole] for _ in range(3)]
    for epochs in range(3):
        loader = make()
        for _ in range(epochs):
            list(loader)
        state = through_json(loader.state_dict())
        resumed = make()
        resumed.load_state_dict(state)
        assert [[content(batch) for batch in resumed] for _ in range(3 - epochs)] == reference[epochs:]
    last, _, resumed = interrupted(make, 3)
    assert [content(batch) for batch in last] == reference[0]
    assert list(resumed) == [], "all batches of the epoch were delivered: what is left of it is its end"
    assert [content(batch) for batch in resumed] == reference[1]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8], ids=lambda mode: mode.name)
def test_a_consumer_that_reads_ahead(mode: Mode, workers: int) -> None:
    def make(workers: int = workers) -> Any:
        return mode.loader(Costly(40), 4, num_workers=workers, shuffle=True, generator=generator())

    loader = make()
    iterator = iter(loader)
    received = [next(iterator).tolist() for _ in range(7)]
    for ahead in range(8):
        resumed = make(min(1, workers))
        state = through_json(loader.state_dict(ahead=ahead))
        if workers == 0 and state["progress"]["above"]:
            continue
        resumed.load_state_dict(state)
        rest = [batch.tolist() for batch in resumed]
        assert sorted_samples([*received[: 7 - ahead], *rest]) == list(range(40))
    assert through_json(loader.state_dict(ahead=np.int64(7))) == through_json(loader.state_dict(ahead=7))
    with pytest.raises(ValueError, match="ahead=8"):
        loader.state_dict(ahead=8)
    rest = [batch.tolist() for batch in iterator]
    resumed = make()
    resumed.load_state_dict(loader.state_dict(ahead=2))
    assert [batch.tolist() for batch in resumed] == rest[-2:] or mode.lateness


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_raised_is_tried_again_unless_the_consumer_went_on(workers: int) -> None:
    def make(bad: int | None) -> Any:
        def sample(index: int) -> Any:
            if index == bad:
                raise ValueError("broken")
            return torch.tensor(index)

        return DataLoader(Made(16, sample), 4, num_workers=workers)

    loader = make(5)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="broken"):
        next(iterator)
    repaired = make(None)
    repaired.load_state_dict(loader.state_dict())
    assert next(batch.tolist() for batch in repaired) == [4, 5, 6, 7]
    assert next(iterator).tolist() == [8, 9, 10, 11]
    repaired.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in repaired] == [[12, 13, 14, 15]]


def test_the_global_generator_is_left_alone() -> None:
    """A script restores it from its own checkpoint; taking up an epoch must not move it."""
    torch.manual_seed(3)
    loader = DataLoader(Costly(20), 4, shuffle=True, num_workers=2)
    iterator = iter(loader)
    first = [next(iterator).tolist() for _ in range(2)]
    state, outside = loader.state_dict(), torch.get_rng_state()
    rest = [batch.tolist() for batch in iterator]
    resumed = DataLoader(Costly(20), 4, shuffle=True, num_workers=2)
    torch.manual_seed(77)
    resumed.load_state_dict(state)
    torch.set_rng_state(outside)
    iterator = iter(resumed)
    assert torch.equal(torch.get_rng_state(), outside)
    assert [batch.tolist() for batch in iterator] == rest
    assert sorted_samples(first + rest) == list(range(20))


# --- fresh processes ---------------------------------------------------------------------------------------------

_POINTS = (0, 1, 2, 5, 7, 8, 11, 13, 15, 16)


def _in_a_process(steps: int | None, state: Any, **more: Any) -> Any:
    """The batches that a new process gets from ``state`` on, and its state then."""
    return json.loads(programs.run(resume_program.__name__, json.dumps(more), given=json.dumps([steps, state])))


@pytest.mark.parametrize(
    "more",
    [  # twelve interpreters each: out of order on request, since test_every_step resumes it in this one
        {"num_workers": 2},
        pytest.param({"num_workers": 2, "in_order": False}, marks=pytest.mark.on_request),
    ],
    ids=str,
)
def test_in_fresh_processes(more: dict[str, Any]) -> None:
    """Ten points of the epoch each; every process takes up what the one before it saved, and the last one ends it."""
    loader = DataLoader(Made(64, draw), 4, shuffle=True, generator=generator(), **more)
    reference = [[list(row) for row in rows([batch])] for batch in loader]
    state: Any = {}
    found: list[Any] = []
    for point in _POINTS:
        got, state = _in_a_process(point - len(found), state, **more)
        found += got
    got, _ = _in_a_process(None, state, **more)
    found += got
    if more.get("in_order", True):
        assert found == reference
    else:
        assert sorted_samples(found) == sorted_samples(reference)
