"""Hypothesis drives the scheduler through everything that lanes, samplers and consumers can do, in any order; the same
events lead to the same instructions. And samples that are delivered one by one."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minato_gpu.samples import SourceBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.composition import ItemComposition
from minato_gpu.scheduling.places import Place, Places
from minato_gpu.scheduling.plans import Plan
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler
from tests.scheduling.model import CUTS, SAMPLE_BYTES, Shell
from tests.support.tickets import span

BATCH = 5
COSTS = st.sampled_from([1e-6, 1e-4, 1e-3, 3e-3, 0.1, 2.0, nan])
LAYING = st.sampled_from([0.0, 1e-6])  # measured: never nan, which is not equal to itself in a replay
BETWEEN = st.sampled_from([CUTS, CUTS[:1], CUTS[1:], ()]).flatmap(
    lambda cuts: st.tuples(*(st.builds(Plan, st.just(cut), COSTS, COSTS, LAYING) for cut in cuts))
)
MODES: dict[str, dict[str, Any]] = {
    "fixed in order": {"fixed": True, "max_lateness": 0},
    "fixed out of order": {"fixed": True, "max_lateness": 2},
    "joined": {"fixed": True, "max_lateness": 0, "joins": True},
    "free": {"fixed": False, "max_lateness": 2},
    "free under a budget": {"fixed": False, "max_lateness": 8, "budget_bytes": 12 * SAMPLE_BYTES},
    "two devices in order": {"fixed": True, "max_lateness": 0, "devices": 2},
    "two devices in order under a budget": {"fixed": True, "devices": 2, "budget_bytes": 3 * SAMPLE_BYTES},
    "two devices, free": {"fixed": False, "max_lateness": 3, "devices": 2, "device_ahead": 2},
    "in order under a budget": {"fixed": True, "max_lateness": 0, "budget_bytes": 3 * SAMPLE_BYTES},
}


class Loader(RuleBasedStateMachine):
    """Random events; the model in ``Shell`` checks each instruction, and in the end everything must be delivered."""

    policy: Policy

    @initialize(slots=st.integers(1, 4), devices=st.integers(0, 2))
    def start(self, slots: int, devices: int) -> None:
        self.shell = Shell(self.policy)
        self.epoch = 0
        self.ended = False
        for number in range(devices):
            self.shell.open(f"device:{number}", 1)
        self.shell.open(m.CPU, slots)

    def _lane(self, choose: int) -> str:
        return sorted(self.shell.lanes)[choose % len(self.shell.lanes)]

    @precondition(lambda self: self.shell.scheduler.room >= BATCH)
    @rule(data=st.data(), short=st.integers(0, 9))
    def admit(self, data: Any, short: int) -> None:
        if self.ended:
            self.epoch, self.ended = self.epoch + 1, False
        size = BATCH
        if short == 0:
            size, self.ended = data.draw(st.integers(1, BATCH)), True
        kind = data.draw(st.sampled_from(["unknown", "cpu", "both", "cut"]))
        cpu = device = between = None
        if kind != "unknown":
            cpu = data.draw(st.lists(COSTS, min_size=size, max_size=size))
        if kind in ("both", "cut"):
            device = data.draw(st.lists(COSTS, min_size=size, max_size=size))
        if kind == "cut":
            between = data.draw(st.lists(BETWEEN, min_size=size, max_size=size))
        fetched = None
        if data.draw(st.booleans()):
            there = data.draw(st.sets(st.integers(0, size - 1)))
            fetched = [(at, at + 1) for at in sorted(there)]
        self.shell.admit(size, self.epoch, cpu, device, between, fetched)

    @precondition(lambda self: bool(self.shell.unfetched))
    @rule(data=st.data())
    def fetch(self, data: Any) -> None:
        serials = data.draw(st.lists(st.sampled_from(sorted(self.shell.unfetched)), min_size=1, unique=True))
        self.shell.fetch(serials, copies=data.draw(st.booleans()))

    @precondition(lambda self: any(chunk.kind == "run" for chunk in self.shell.held.values()))
    @rule(choose=st.integers(0, 50), share=st.floats(0, 1), fails=st.integers(0, 5), heeds=st.booleans())
    def finish(self, choose: int, share: float, fails: int, heeds: bool) -> None:
        shell = self.shell
        number = sorted(shell.begun)[choose % len(shell.begun)] if shell.begun else min(shell.held)
        before, size = shell.done[number], shell.held[number].size
        upto = min(size, before + 1 + int(share * (size - before)))
        shell.finish(number, upto, tuple(range(before, min(upto, before + fails))), heeds=heeds)

    @precondition(lambda self: bool(self.shell.held))
    @rule(choose=st.integers(0, 50))
    def lose_worker(self, choose: int) -> None:
        shell = self.shell
        number = sorted(shell.held)[choose % len(shell.held)]
        lane = shell.held[number].lane
        if shell.lanes[lane] > (lane == m.CPU):  # at least one worker of the CPU stays
            shell.open(lane, -1)
            shell.give_back(number)

    @precondition(lambda self: bool(self.shell.held))
    @rule(choose=st.integers(0, 50), lo=st.floats(0, 1), size=st.integers(0, 3))
    def worker_dies(self, choose: int, lo: float, size: int) -> None:
        """Its slot may have been the last of its lane; what it was at may be given up."""
        shell = self.shell
        number = sorted(shell.held)[choose % len(shell.held)]
        if shell.lanes[shell.held[number].lane] > 0:
            done, end = shell.done[number], shell.held[number].size
            first = done + int(lo * (end - done))
            shell.lose(number, (first, min(first + size, end)))

    @rule(choose=st.integers(0, 5))
    def gain_worker(self, choose: int) -> None:
        self.shell.open(self._lane(choose), 1)

    @rule()
    def look(self) -> None:
        self.shell.look()
        due = self.shell.scheduler.wake_at()
        assert due is None or due > self.shell.now

    @rule()
    def ask(self) -> None:
        self.shell.ask()

    @rule()
    def end(self) -> None:
        self.shell.tell(m.Ended(self.shell.tick(), self.epoch))

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "shell"):
            return
        shell, scheduler = self.shell, self.shell.scheduler
        delivered = len(shell.delivered_serials())
        assert scheduler.room == self.policy.window - (len(shell.place_of) - delivered)
        ready_bytes = SAMPLE_BYTES * (len(shell.ready) - delivered)
        running = sum(chunk.size - shell.done[number] for number, chunk in shell.held.items())
        held_bytes = ready_bytes + SAMPLE_BYTES * shell.waiting_on()
        assert abs(scheduler._ledger.in_flight - held_bytes - SAMPLE_BYTES * running) <= SAMPLE_BYTES * running
        if self.policy.budget_bytes is not None and not shell.lost_slots:
            least = max(self.policy.budget_bytes, BATCH * SAMPLE_BYTES)  # a batch must fit, whatever the budget
            assert ready_bytes + SAMPLE_BYTES * running <= least + SAMPLE_BYTES * shell.most_slots

    def _fill(self) -> None:
        """Admits what the window has room for, of one epoch or several, at times cheap ones, leased together."""
        events, number = len(self.shell.log), 0
        costs, each = [1e-6] * BATCH if events % 2 else None, 2 if events % 4 < 2 else 9
        while self.shell.scheduler.room >= BATCH:
            self.shell.admit(BATCH, self.epoch + self.ended + number // each, costs)
            number += 1

    def teardown(self) -> None:
        if not hasattr(self, "shell"):
            return
        self._fill()
        self.shell.drain()
        again = Scheduler(self.policy)
        assert [again.handle(event) for event, _ in self.shell.log] == [said for _, said in self.shell.log]


@pytest.mark.parametrize("mode", MODES)
def test_any_course_of_events(mode: str) -> None:
    machine = type("Machine", (Loader,), {"policy": Policy(window=20, **MODES[mode])})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_samples_that_are_delivered_one_by_one_are_composed_as_they_come() -> None:
    """In runs that begin at their first sample's order, within one place; what has failed is one by itself."""
    places = Places()
    composition = ItemComposition(places)
    first, shift = 10, 3  # an earlier run has delivered the others
    for lo, hi in [(10, 16), (16, 17), (17, 20)]:
        place = Place(m.Admitted(0.0, SourceBatch(lo + shift), 0, TicketId(lo), hi - lo))
        composition.admit(place, hi - lo)
        places.admit(place)
    runs: list[m.Compose] = []
    for lo, hi, failed in [(18, 20, ()), (first, 12, ()), (12, 18, (13, 14))]:
        bad = tuple(map(TicketId, failed))
        composition.finished(0, span(lo, hi), bad, places.finish(span(lo, hi), bad))
        while (run := composition.compose(False)) is not None:
            runs.append(run)
    assert all(run.order == run.spans[0][0] + shift for run in runs)
    assert sorted((*run.spans[0], run.failed) for run in runs) == [
        (10, 12, ()),
        (12, 13, ()),
        (13, 14, (13,)),
        (14, 15, (14,)),
        (15, 16, ()),
        (16, 17, ()),
        (17, 18, ()),
        (18, 20, ()),
    ]
