"""What the loader itself spends on a sample, counted instead of timed, so that no change takes it back unnoticed.

Fixed runs on a clock of their own (``tests.support.lockstep``): worker threads whose samples "sleep", batches of 64,
another order in each epoch; the second is counted. And the scheduler alone, which hears again what it heard in a
simulated run. Every figure is the same in every run; a change that makes one smaller lowers its limit.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from benchmarks.scaling.cells import BATCH_SIZE, Cell
from minato_gpu import DataLoader
from minato_gpu.lab.simulation.virtual_loader import VirtualLoader
from minato_gpu.lab.simulation.work import Work
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler
from tests.support.calls import calls_of
from tests.support.lockstep import CONSUMER, PUMP, WORKERS, Counts, Lockstep

pytestmark = pytest.mark.usefixtures("no_leaks")


class Cost(NamedTuple):
    """What a sample cost: ``training``: Python calls in the training process, its pump thread included; ``workers``: in
    the workers; ``wakes``: how often the training process was woken, in either thread; ``tasks`` that were sent;
    ``lost``: which part of the workers' time in both epochs was not used.
    """

    training: float
    workers: float
    wakes: float
    tasks: float
    lost: float


LIMITS: dict[tuple[Cell, str], Cost] = {  # today's figures and some three hundredths
    (Cell(8, 3, "half"), "in order"): Cost(9.95, 7.4, 0.0278, 0.0288, 0.0015),
    (Cell(8, 3, "half"), "bounded"): Cost(23.5, 14.3, 0.033, 0.0295, 0.001),
    (Cell(8, 3, "half", 0.9), "in order"): Cost(6.65, 7.0, 0.0161, 0.0171, 0.03),
    (Cell(32, 10, "none"), "in order"): Cost(16.6, 9.7, 0.038, 0.0704, 0.001),
    (Cell(8, 3, "tail"), "in order"): Cost(25.3, 10.9, 0.082, 0.111, 0.001),
    (Cell(8, 3, "tail"), "bounded"): Cost(32.6, 16.8, 0.09, 0.1135, 0.001),
    (Cell(8, 0.02, "half"), "in order"): Cost(5.85, 6.7, 0.0041, 0.0162, 0.043),
    (Cell(2, 0.005, "half", 0.5), "in order"): Cost(3.58, 6.6, 0.0003, 0.0031, 0.0075),
}
"""At most so much, of a cell by the order of its batches. Other kinds of work are for ``benchmarks.scaling``."""

_BATCHES = 80
_WINDOW = 256


class Sleeping:
    """Samples that take their cost on the clock."""

    def __init__(self, costs_s: Any, lockstep: Lockstep) -> None:
        self._costs_s = costs_s
        self._lockstep = lockstep

    def __len__(self) -> int:
        return len(self._costs_s)

    def __getitem__(self, index: int) -> Any:
        self._lockstep.sleep(float(self._costs_s[index]))
        return np.full(16, index)


def second_epoch(
    cell: Cell, order: str, patch: pytest.MonkeyPatch, batches: int = 0, **more: Any
) -> tuple[Cost, Counts]:
    """Run two epochs of ``batches`` (0: as few as will do); ``more`` arguments for the loader."""
    batches = batches or max(_BATCHES, 3 * cell.workers)  # more than the window holds
    costs_s = cell.costs_s(batches * BATCH_SIZE)
    bound_s = float(costs_s.sum()) / cell.workers
    lockstep = Lockstep(cell.workers, patch)
    overlapping = {"persistent_workers": True, "epochs": 3}  # the third is prepared while the second ends
    chosen: dict[str, Any] = {"worker_kind": "thread", "in_order": order == "in order", **overlapping}
    generator = torch.Generator().manual_seed(3)
    dataset: Any = Sleeping(costs_s, lockstep)
    loader: Any = DataLoader(dataset, BATCH_SIZE, True, num_workers=cell.workers, generator=generator, **chosen, **more)

    def epoch() -> None:
        for batch in loader:
            assert len(batch) == BATCH_SIZE
            if cell.load:
                lockstep.advance(bound_s / cell.load / batches)

    begin = lockstep.now
    try:
        epoch()
        with lockstep.counted():
            epoch()
        elapsed_s = lockstep.now - begin
    finally:
        lockstep.release()
    counts, samples = lockstep.counts, len(costs_s)
    cost = Cost(
        (counts.calls[CONSUMER] + counts.calls[PUMP]) / samples,
        counts.calls[WORKERS] / samples,
        sum(counts.wakes.values()) / samples,
        sum(counts.tasks.values()) / samples,
        1 - 2 * bound_s / min(cell.load or 1, 1) / elapsed_s,
    )
    return cost, counts


@pytest.mark.parametrize(("cell", "order"), LIMITS, ids=[f"{cell.name}, {order}" for cell, order in LIMITS])
def test_what_a_sample_costs(cell: Cell, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (cost, _), limit = second_epoch(cell, order, monkeypatch), LIMITS[cell, order]
    for name in Cost._fields:
        found, most = getattr(cost, name), getattr(limit, name)
        assert found <= most, f"{name}: {found:.4g}, and at most {most:.4g} were allowed; all: {cost}"


def test_an_epoch_ends_when_its_work_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases become shorter towards the end of an epoch, whether or not the next one follows: no slot is left with a
    long one. (With leases of one length, the end would cost 0.13; with the 8 workers of the first cell above 0.03.)"""
    cost, _ = second_epoch(Cell(32, 3, "half"), "in order", monkeypatch)
    assert cost.lost <= 0.01


def test_batches_of_some_milliseconds_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an epoch that is long enough for it: one by one, each batch would be a task (0.0158 for a sample)."""
    cost, _ = second_epoch(Cell(2, 0.08, "half"), "in order", monkeypatch, batches=320)
    assert cost.training <= 6.1 and cost.tasks <= 0.0108 and cost.lost <= 0.001


@pytest.mark.each_value
@pytest.mark.parametrize("batches", [2, 4, 8])
@pytest.mark.parametrize("order", ["in order", "bounded"])
def test_a_budget_leaves_no_slot_without_work(order: str, batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are as short as the memory that all slots share; the window would hold 16 batches."""
    budget = batches * BATCH_SIZE * np.full(16, 0).nbytes
    cost, _ = second_epoch(Cell(8, 3, "half"), order, monkeypatch, host_memory_budget=budget)
    assert cost.lost <= 0.005


def test_a_collate_fn_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is joined by the worker that has prepared all of it: no sample is laid down for another, nor told by
    itself."""
    cost, counts = second_epoch(Cell(8, 3, "half"), "in order", monkeypatch, collate_fn=np.stack)
    assert counts.tasks["collate"] <= 0.1 * _BATCHES
    assert cost.training <= 7.8 and cost.workers <= 4.9 and cost.lost <= 0.015


def test_a_run_is_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = []
    for _ in range(2):
        with monkeypatch.context() as patch:
            costs.append(second_epoch(Cell(4, 3, "tail", 0.9), "bounded", patch)[0])
    assert costs[0] == costs[1] and costs[0].training > 0


def _trivial() -> Work:
    """Samples of 2 us, which travel in chunks."""
    cost = np.full(16_384, 2e-6)
    return Work(cost, cost, BATCH_SIZE, (len(cost),), slots=2)


def _costly(devices: int) -> Work:
    """Samples of 4 ms on the mean, log-normal, which are decided on one by one."""
    rng, samples = np.random.default_rng(1), 2048
    x = rng.lognormal(-0.5, 1.0, samples)  # mean 1
    cpu, error = 4e-3 * x, rng.lognormal(0.0, 0.3, (2, samples))
    if not devices:
        return Work(cpu, cpu * error[0], BATCH_SIZE, (samples,), slots=14)
    device = (0.5e-3 + 0.5e-3 * x) * rng.lognormal(0.0, 0.3, samples)
    known = {"predicted_cpu": cpu * error[0], "predicted_device": device * error[1]}
    return Work(cpu, batch=BATCH_SIZE, epoch_samples=(samples,), slots=14, device=device, devices=devices, **known)


class _Recorder(Scheduler):
    """A scheduler that remembers what it heard."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.heard: list[m.Event] = []

    def handle(self, event: m.Event) -> list[m.Instruction]:
        self.heard.append(event)
        return super().handle(event)


@pytest.mark.parametrize(
    ("work", "max_lateness", "limit"),
    [
        pytest.param(_costly(0), 0, 54.6, id="costly, CPU, 0 late"),
        pytest.param(_costly(1), 0, 78.9, id="costly, CPU and device, 0 late"),
        pytest.param(_costly(1), 8, 81.7, id="costly, CPU and device, 8 late"),
        pytest.param(_trivial(), 0, 2.07, id="trivial, CPU, 0 late"),
        pytest.param(_trivial(), 8, 2.19, id="trivial, CPU, 8 late"),
    ],
)
def test_what_a_decision_costs(work: Work, max_lateness: int, limit: float) -> None:
    """At most so many Python calls of the scheduler for each sample."""
    policy = Policy(window=_WINDOW, fixed=max_lateness == 0, max_lateness=max_lateness)
    virtual = VirtualLoader(work, policy)
    virtual.scheduler = recorder = _Recorder(policy)
    virtual.run()
    scheduler = Scheduler(policy)

    def hear_again() -> None:
        for event in recorder.heard:
            scheduler.handle(event)
            _ = scheduler.room
            scheduler.wake_at()

    found = calls_of(hear_again) / len(work.cpu)
    assert found <= limit, f"{found:.4g} calls"


@pytest.mark.parametrize(("batch_size", "limit"), [(1, 28), (64, 91)])
def test_what_a_batch_costs_without_workers(batch_size: int, limit: int) -> None:
    """Of samples that cost nothing: some calls for a batch, and not more than one for each sample."""
    keys: Any = range(200 * batch_size)
    epochs = [iter(DataLoader(keys[: batches * batch_size], batch_size, collate_fn=tuple)) for batches in (100, 200)]
    short, long = (calls_of(lambda epoch=epoch: deque(epoch, 0)) for epoch in epochs)  # type: ignore[misc]
    found = (long - short) / 100
    assert found <= limit, f"{found:.4g} calls"
