"""When slow samples start, what may start before the oldest, how many workers are at work, each rank's share of a
host's cores, and the window's length."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minato_gpu.engine.host_share import Need, shares
from minato_gpu.lab.simulation.virtual_loader import VirtualLoader
from minato_gpu.lab.simulation.work import Work
from minato_gpu.samples import SourceBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.pacing import EARLY_SLOTS, Pace
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler
from minato_gpu.scheduling.window_length import WindowLength
from minato_gpu.scheduling.worker_count import WorkerCount
from tests.support.tickets import span

SIZE, SLOTS = 8, 4
CHEAP_S, SLOW_S = 0.02, 3.0


def test_a_sample_starts_as_many_places_early_as_others_are_prepared_meanwhile() -> None:
    pace = Pace(Policy(window=64))
    pace.slots = pace.cpu_slots = EARLY_SLOTS
    pace.cpu_capacity = float(EARLY_SLOTS)
    pace.expect(0.1, None, 64)
    pace.measure()
    assert pace.tau == pytest.approx(0.1 / EARLY_SLOTS)
    assert pace.priority(100, 20 * pace.tau, cold=False) == pytest.approx(80)


def _sent(policy: Policy, places: list[list[float]], slots: int, known: m.LaneCosts | None = None) -> list[m.Chunk]:
    """What the slots of a lane are given at first, of samples that cost so much."""
    scheduler, first = Scheduler(policy), 0
    for place, costs in enumerate(places):
        scheduler.handle(m.Admitted(0.0, SourceBatch(place), 0, TicketId(first), len(costs), costs))
        first += len(costs)
    said = scheduler.handle(m.LaneOpened(0.0, m.CPU, slots, known=known))
    return [each.chunk for each in said if isinstance(each, m.Dispatch)]


def _first(budget: int | None) -> list[int]:
    """The first serial that each slot takes: the last sample of the second batch is slow."""
    costs = [CHEAP_S] * SIZE
    sent = _sent(Policy(window=4 * SIZE, budget_bytes=budget), [costs, [*costs[1:], SLOW_S], costs, costs], SLOTS)
    return [chunk.spans[0][0] for chunk in sent]


def test_a_slow_sample_starts_first() -> None:
    assert _first(None)[0] == 2 * SIZE - 1


def test_memory_is_set_aside_for_the_oldest_batch_first() -> None:
    """While sizes are unknown there is room for one sample in each slot, and the oldest batch needs all of it."""
    assert max(_first(1 << 20)) < SIZE


def test_samples_that_are_taken_back_go_to_another_slot() -> None:
    scheduler = Scheduler(Policy(window=64))
    scheduler.handle(m.Admitted(0.0, SourceBatch(0), 0, TicketId(0), SIZE, [1e-4] * SIZE))
    said = scheduler.handle(m.LaneOpened(0.0, m.CPU, 1))
    (chunk,) = [each.chunk for each in said if isinstance(each, m.Dispatch)]
    assert chunk.spans == ((0, SIZE),)
    said = scheduler.handle(m.LaneOpened(0.0, m.CPU, 1))
    assert not said, "all is at the first slot"
    said = scheduler.handle(m.Running(1.0, chunk.number, 2, 1.0))
    assert said == [m.Revoke(m.CPU, chunk.number, 3)]
    said = scheduler.handle(m.Revoked(1.0, chunk.number, 3))
    sent = [span for each in said if isinstance(each, m.Dispatch) for span in each.chunk.spans]
    assert min(sent)[0] == 3 and sum(hi - lo for lo, hi in sent) == SIZE - 3


def _lease_under_a_budget() -> tuple[Scheduler, m.Chunk]:
    """Room for 100 samples of 100 bytes: one is ready, and the lane has a lease of many others."""
    scheduler = Scheduler(Policy(window=256, budget_bytes=10_000))
    scheduler.handle(m.Admitted(0.0, SourceBatch(0), 0, TicketId(0), 256, [1e-5] * 256))
    first, *_ = scheduler.handle(m.LaneOpened(0.0, m.CPU, 1))
    assert isinstance(first, m.Dispatch) and first.chunk.size == 1, "sizes are unknown"
    lease, *_ = scheduler.handle(m.Finished(0.1, first.chunk.number, 1, 1e-5, 100))
    assert isinstance(lease, m.Dispatch) and 20 < lease.chunk.size < 100
    assert lease.chunk.credit == 100 * lease.chunk.size
    return scheduler, lease.chunk


def test_what_a_worker_has_used_of_its_credit_is_not_given_to_others_as_its_samples_are() -> None:
    """It has come to three large ones as the rest is taken back (P4)."""
    scheduler, chunk = _lease_under_a_budget()
    said = scheduler.handle(m.LaneOpened(0.1, m.CPU, 1))
    assert scheduler.handle(m.Running(1.0, chunk.number, 2, 1.0)) == [m.Revoke(m.CPU, chunk.number, 3)]
    used = chunk.credit - 200
    said += scheduler.handle(m.Revoked(1.0, chunk.number, 3, used))
    others = sum(each.chunk.credit for each in said if isinstance(each, m.Dispatch))
    assert 9_000 < 100 + used + others <= 10_000


def test_a_credit_is_used_up_by_bytes_and_not_by_samples() -> None:
    """All samples of a lease but the last are small: that one may still be as large as all were expected to be."""
    scheduler, chunk = _lease_under_a_budget()
    done = chunk.size - 1
    said = scheduler.handle(m.Finished(0.2, chunk.number, done, 1e-5, done, final=False))
    others = sum(each.chunk.credit for each in said if isinstance(each, m.Dispatch))
    assert scheduler._ledger.in_flight == 100 + chunk.credit + others
    scheduler.handle(m.Finished(0.3, chunk.number, chunk.size, 1e-5, 1))
    assert scheduler._ledger.in_flight < 10_000


EVEN = m.LaneCosts(300, 0.01, 1e-6)


def _run(slots: int, *, known: m.LaneCosts | None = None, says: bool = True) -> tuple[float, int]:
    """Twenty batches of 16 samples that all take 10 ms, in order, where only the sampler's length tells how many are to
    come: by how much the run is longer than its work, and how many leases it takes."""
    cost = np.full(320, 0.01)
    work = Work(cost, cost, 16, (320,), slots)
    loader = VirtualLoader(work, Policy(2 * slots * 16), trip_s=1e-4)
    handle, leases = loader.scheduler.handle, 0

    def told(event: m.Event) -> list[m.Instruction]:
        nonlocal leases
        if isinstance(event, m.LaneOpened):
            event = replace(event, known=known)
        elif isinstance(event, m.Admitted):
            event = replace(event, last=False, follow=event.follow if says else None)
        said = handle(event)
        leases += sum(isinstance(each, m.Dispatch) for each in said)
        return said

    loader.scheduler.handle = told  # type: ignore[method-assign]
    return loader.run().makespan_s * slots / cost.sum() - 1, leases


@pytest.mark.parametrize("slots", [2, 4])
def test_what_was_learnt_in_an_earlier_run_makes_leases_long_from_the_beginning(slots: int) -> None:
    assert _run(slots, known=EVEN)[1] < 0.7 * _run(slots)[1]


@pytest.mark.parametrize("slots", [2, 4])
def test_few_slots_end_together_as_the_sampler_says_how_much_is_left(slots: int) -> None:
    """Long leases; the window holds two places for each slot, and shows the end too late."""
    assert _run(slots, known=EVEN)[0] < 0.005
    assert _run(slots, known=EVEN, says=False)[0] > 0.02


def test_samples_to_be_copied_travel_together_wherever_they_are_in_their_batches() -> None:
    scheduler = Scheduler(Policy(window=4 * SIZE, shares=True))
    scheduler.handle(m.LaneOpened(0.0, m.CPU, 1, known=m.LaneCosts(100, CHEAP_S, 0.0)))
    for place in range(2):
        first = TicketId(place * SIZE)
        scheduler.handle(m.Admitted(0.0, SourceBatch(place), 0, first, SIZE, fetched=[]))
    copies = [span(0, 3), span(4, 7), span(SIZE + 1, SIZE + 2)]
    sent = [each.chunk.spans for each in scheduler.handle(m.Fetched(0.0, [], copies)) if isinstance(each, m.Dispatch)]
    assert sent == [tuple(copies)]


def test_a_lease_does_not_end_with_every_batch_of_one_sample() -> None:
    """Half a second's eighth is 8 samples of 10 ms; the first lease alone is of the batch that is waited for."""
    first, *others = (chunk.size for chunk in _sent(Policy(window=256), [[0.01]] * 256, 2, EVEN))
    assert first == 1 and min(others) >= 7


BATCH = 16


class Training:
    """A consumer whose steps take ``step_s``; workers of whom each prepares a sample in ``sample_s``, on ``cores``."""

    def __init__(self, count: WorkerCount, sample_s: float, step_s: float, cores: float) -> None:
        self.count, self.sample_s, self.step_s, self.cores = count, sample_s, step_s, cores
        self.now = 0.0
        self.seen: list[int] = []

    def run(self, seconds: float) -> None:
        """Deliver batches for so long."""
        end = self.now + seconds
        while self.now < end:
            prepared_s = BATCH * self.sample_s / min(self.count.workers, self.cores)
            took_s = max(prepared_s, self.step_s)
            idle = int(self.count.workers * (1 - prepared_s / took_s))
            self.now += took_s
            self.count.waited("preparation", took_s - self.step_s)
            self.count.delivered(self.now, BATCH, idle)
            self.seen.append(self.count.workers)

    def later(self, seconds: float) -> list[int]:
        """The numbers that are seen in the second half of so long a time."""
        self.run(seconds / 2)
        del self.seen[:]
        self.run(seconds / 2)
        return self.seen


def test_more_are_at_work_while_that_pays() -> None:
    training = Training(WorkerCount(2, 16), 0.01, 0.0, cores=64)
    training.run(10.0)
    assert training.count.workers == 16 and training.seen[0] == 2


def test_as_many_as_the_steps_need() -> None:
    """16 samples of 10 ms in a step of 20 ms are eight workers' work."""
    training = Training(WorkerCount(2, 32), 0.01, 0.02, cores=64)
    assert 8 <= min(training.later(40.0)) <= max(training.seen) <= 12


def test_where_cores_are_short_others_are_tried_seldom() -> None:
    training = Training(WorkerCount(4, 16), 0.01, 0.0, cores=4)
    seen = training.later(400.0)
    assert max(seen) == 6 and seen.count(4) > 0.95 * len(seen)


@pytest.mark.parametrize(("sample_s", "least", "most"), [(0.002, 1, 4), (0.02, 15, 16)], ids=["cheaper", "dearer"])
def test_samples_that_become_cheaper_send_workers_to_rest_and_dearer_ones_bring_them_back(
    sample_s: float, least: int, most: int
) -> None:
    training = Training(WorkerCount(2, 16), 0.01, 0.02, cores=64)
    training.run(30.0)
    training.sample_s = sample_s
    seen = training.later(40.0)
    assert least <= min(seen) <= max(seen) <= most


NEEDS = st.lists(st.builds(Need, st.floats(0, 16), st.integers(1, 16)), min_size=1, max_size=8)


@given(NEEDS, st.integers(1, 64))
def test_each_has_a_core_at_least_and_who_has_less_ready_no_fewer(needs: list[Need], cores: int) -> None:
    """None has more than it can use, and no core is left that somebody could use."""
    found = shares(needs, cores)
    assert all(1 <= mine <= need.most for mine, need in zip(found, needs, strict=True))
    assert min(cores, sum(need.most for need in needs)) <= sum(found) <= max(cores, len(needs)) + len(needs) - 1
    for mine, need in zip(found, needs, strict=True):
        for other, more in zip(found, needs, strict=True):
            assert need.ready >= more.ready or mine >= min(other, need.most)


def grown(most: int, limit: int = 1000) -> WindowLength:
    """A window that has grown by as much as it may."""
    window = WindowLength(1, most, limit)
    for _ in range(most):
        window.lengthen(0, 10.0)
        window.grown = False
    assert window.extra == most
    return window


def test_it_grows_by_one_batch_and_again_once_that_is_admitted() -> None:
    window = WindowLength(1, 5, 100)
    window.lengthen(10, 20.0)
    window.lengthen(10, 20.0)
    assert (window.extra, window.grown) == (1, True)
    window.grown = False
    window.lengthen(10, 20.0)
    assert window.extra == 2


@pytest.mark.parametrize(("in_flight", "batch_bytes"), [(81, 20.0), (0, 0.0)], ids=["too many bytes", "size unknown"])
def test_it_does_not_grow(in_flight: int, batch_bytes: float) -> None:
    window = WindowLength(1, 5, 100)
    window.lengthen(in_flight, batch_bytes)
    assert (window.extra, window.grown) == (0, False)


def test_it_shrinks_after_as_many_batches_as_it_may_grow_by() -> None:
    window = grown(3)
    lengths = []
    for _ in range(7):
        window.delivered(1, 0, 10.0)
        lengths.append(window.extra)
    assert lengths == [3, 3, 2, 2, 2, 1, 1]


def test_cheap_batches_are_admitted_together_once_the_window_holds_two_groups_for_each_worker() -> None:
    window = WindowLength(4, 28, 1000, 4)
    groups = []
    for _ in range(30):
        window.measured(0.3e-3, 2e-3)
        window.delivered(1, 0, 10.0)
        window.grown = False
        groups.append(window.together)
    assert (window.extra, groups[::4]) == (20, [1, 2, 3, 4, 5, 6, 6, 6])
    window.measured(1.5e-3, 2e-3)
    assert window.together == 1


def test_a_window_that_may_not_grow_has_groups_as_it_is() -> None:
    window = WindowLength(32, 0, 1000, 4)
    window.measured(0.1e-3, 2e-3)
    window.delivered(1, 0, 10.0)
    assert (window.extra, window.together) == (0, 8)


def test_a_window_of_cheap_batches_grows_within_its_bytes() -> None:
    window = WindowLength(4, 28, 100, 4)
    window.measured(0.3e-3, 2e-3)
    window.delivered(1, 95, 10.0)
    assert (window.extra, window.together) == (0, 1)


def test_a_reserve_is_prepared_where_samples_are_unlike() -> None:
    """5 % of the samples take 40 times as long; a consumer asks for as much as the workers can do at most."""
    costs = np.full(1500, 0.003)
    costs[np.random.default_rng(11).choice(1500, 75, replace=False)] = 0.12
    work = Work(costs, costs, 16, (1500,), slots=2)
    period = float(costs.sum()) / 2 / work.batches
    policies = [Policy(4 * work.batch, more_batches=more, window_bytes=1 << 30) for more in (0, 28)]
    loaders = [VirtualLoader(work, policy, period, trip_s=2e-4) for policy in policies]
    fixed, growing = (period * work.batches / (loader.run().makespan_s + period) for loader in loaders)
    assert fixed < 0.94 and growing > 0.95


def test_each_slot_gets_one_sample_before_their_size_is_known() -> None:
    sent = _sent(Policy(window=256, budget_bytes=1 << 20), [[0.01] * 16] * 16, 4, EVEN)
    assert [chunk.size for chunk in sent[:4]] == [1] * 4
