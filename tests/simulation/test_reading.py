"""The loader under a virtual clock, whose samples' bytes come from somewhere; steps that differ; leases' midst."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from minato_gpu.scheduling.policy import Policy
from minato_gpu.simulation.peers import BATCH_IN_ORDER, simulate_peer
from minato_gpu.simulation.reading import Arrival
from minato_gpu.simulation.virtual import VirtualLoader, run_together
from minato_gpu.simulation.work import Outcome, Work

SAMPLES, BATCH, SLOTS = 64, 8, 2
COST_S = 0.01


class OneByOne:
    """Brings samples in the order in which they are wanted, each ``seconds`` after the one before."""

    def __init__(self, seconds: float, ahead: int = 100) -> None:
        self.ahead, self.seconds = ahead, seconds
        self.begun: list[tuple[float, int]] = []
        self.wanted: list[int] = []
        self.released: list[int] = []
        self._coming: list[tuple[float, int]] = []
        self._free_at = 0.0

    def begin(self, now: float, epoch: int) -> None:
        self.begun.append((now, epoch))

    def want(self, now: float, place: int, serials: range) -> None:
        for serial in serials:
            self._free_at = max(now, self._free_at) + self.seconds
            self._coming.append((self._free_at, serial))
        self.wanted += serials

    def release(self, now: float, serials: Iterable[int]) -> None:
        self.released += serials

    def next_at(self) -> float:
        return self._coming[0][0] if self._coming else float("inf")

    def advance(self, until: float) -> Arrival | None:
        if not self._coming or self._coming[0][0] > until:
            return None
        now = self._coming[0][0]
        told = [serial for at, serial in self._coming if at <= now]
        del self._coming[: len(told)]
        return Arrival(now, told)


def work(epochs: int = 1, cost_s: float = COST_S) -> Work:
    cost = np.full(SAMPLES * epochs, cost_s)
    return Work(cost, cost, BATCH, (SAMPLES,) * epochs, SLOTS)


def run(reading: OneByOne | None, epochs: int = 1, **options: object) -> Outcome:
    return VirtualLoader(work(epochs), Policy(4 * BATCH), reading=reading, **options).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("precise", [False, True])
def test_no_sample_is_prepared_before_its_bytes_are_there(precise: bool) -> None:
    """Twice as slow as the workers: the last one comes after all of them, and is then prepared."""
    reading = OneByOne(COST_S)
    outcome = run(reading, precise=precise)
    assert outcome.makespan_s == pytest.approx((SAMPLES + 1) * COST_S, rel=0.02)
    assert outcome.serials.tolist() == reading.wanted == sorted(reading.released) == list(range(SAMPLES))


def test_fast_storage_costs_nothing() -> None:
    assert run(OneByOne(1e-6)).makespan_s == pytest.approx(run(None).makespan_s, rel=0.05)


def test_no_more_is_wanted_than_is_drawn_early() -> None:
    reading = OneByOne(1.0, ahead=2)
    loader = VirtualLoader(work(), Policy(4 * BATCH), reading=reading)
    seen: list[int] = []
    want = reading.want

    def watched(now: float, place: int, serials: range) -> None:
        seen.append(place - int(now > 0) * len(reading.released) // BATCH)
        want(now, place, serials)

    reading.want = watched  # type: ignore[method-assign]
    loader.run()
    assert max(seen) <= 4 + 2


@pytest.mark.parametrize(("overlap", "precise"), [(False, False), (True, True), (True, False)])
def test_epochs_are_drawn_when_they_may_be(overlap: bool, precise: bool) -> None:
    reading = OneByOne(1e-6)
    outcome = run(reading, 3, overlap=overlap, precise=precise)
    ends = outcome.times.reshape(3, -1)[:, -1]
    begun = [time for time, _ in reading.begun]
    assert [epoch for _, epoch in reading.begun] == [0, 1, 2]
    if not overlap:
        assert begun[1:] == ends[:2].tolist()
    elif precise:
        assert begun[:2] == [0.0, 0.0] and begun[2] == ends[0]  # the second is being delivered
    else:
        assert begun == [0.0] * 3


def test_a_batch_is_complete_as_soon_as_its_last_sample_is() -> None:
    """A lease goes on beyond the batch that is waited for."""
    cost = np.full(SAMPLES, COST_S)
    policy = Policy(8 * BATCH, lease_share=1.0)
    of_leases, of_samples = (
        VirtualLoader(Work(cost, cost, BATCH, (SAMPLES,), SLOTS), policy, precise=precise).run()
        for precise in (False, True)
    )
    assert of_samples.times[0] <= of_leases.times[0] and of_samples.times.mean() < of_leases.times.mean()
    assert of_samples.makespan_s == pytest.approx(of_leases.makespan_s, rel=0.03)


@pytest.mark.parametrize("ours", [True, False])
def test_every_batch_has_a_step_of_its_own(ours: bool) -> None:
    steps = [0.1 * (1 + number % 3) for number in range(SAMPLES // BATCH)]
    cheap = work(cost_s=1e-5)
    if ours:
        outcome = VirtualLoader(cheap, Policy(4 * BATCH), steps=steps).run()
    else:
        outcome = simulate_peer(BATCH_IN_ORDER, cheap, 4 * BATCH, 0, steps)
    assert np.diff(outcome.times) == pytest.approx(steps[:-1], abs=1e-3)


class Shared(OneByOne):
    """Tells of what another brings, too."""

    def __init__(self, seconds: float, line: list[float], seen: list[float]) -> None:
        super().__init__(seconds)
        self.line, self.seen = line, seen

    def want(self, now: float, place: int, serials: range) -> None:
        self.seen.append(now)
        self._free_at = self.line[0]
        super().want(now, place, serials)
        self.line[0] = self._free_at

    def release(self, now: float, serials: Iterable[int]) -> None:
        self.seen.append(now)
        super().release(now, serials)

    def advance(self, until: float) -> Arrival | None:
        came = super().advance(until)
        self.seen += [came.at] if came else []
        return came


def test_what_happens_first_is_done_first_also_among_several() -> None:
    """Else the one that is simulated ahead would have had of what they share what the other asks for before it."""
    line, seen = [0.0], list[float]()
    readings = [Shared(seconds, line, seen) for seconds in (COST_S / 3, COST_S, COST_S / 2)]
    loaders = [VirtualLoader(work(2), Policy(4 * BATCH), reading=each, overlap=False) for each in readings]
    outcomes = run_together(loaders)
    assert seen == sorted(seen) and len(seen) > 3 * SAMPLES
    assert all(outcome.serials.tolist() == list(range(2 * SAMPLES)) for outcome in outcomes)
    assert max(each.makespan_s for each in outcomes) >= 2 * SAMPLES * sum(each.seconds for each in readings)
