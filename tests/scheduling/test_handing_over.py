"""Samples that change lanes: the memory that they hold meanwhile, devices that go, and who is asked to hand over."""

from __future__ import annotations

import pytest

from minato_gpu.samples import SourceBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.ledger import Ledger
from minato_gpu.scheduling.plans import Plan
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler
from tests.support.tickets import entry_of

HANDED, FINAL = 1000, 10
CUT = 2


class Driver:
    """Lanes driven by hand; what lies ready or handed over is counted."""

    def __init__(self, policy: Policy, *lanes: tuple[str, int]) -> None:
        self.scheduler = Scheduler(policy)
        self.live: dict[int, m.Chunk] = {}
        self.stage: set[int] = set()
        self.held = self.peak = self.ready = 0
        self.composed: list[m.Compose] = []
        self.order: list[int] = []  # what the CPU has done
        self.now = 0.0
        for name, slots in lanes:
            self.tell(m.LaneOpened(0.0, name, slots, m.CPU if name == m.CPU else m.DEVICE))

    def tell(self, event: m.Event) -> list[m.Instruction]:
        """Hand over the event, and keep what is dispatched."""
        said = self.scheduler.handle(event)
        for instruction in said:
            if isinstance(instruction, m.Dispatch):
                self.live[instruction.chunk.number] = instruction.chunk
            elif isinstance(instruction, m.Compose):
                self.composed.append(instruction)
        return said

    def on(self, lane: str) -> list[m.Chunk]:
        """What the lane holds, oldest first."""
        return [chunk for _, chunk in sorted(self.live.items()) if chunk.lane == lane]

    def finish(self, chunk: m.Chunk) -> None:
        """The chunk is done, or has come to its stop."""
        del self.live[chunk.number]
        self.now += 0.01
        serials = [serial for lo, hi in chunk.spans for serial in range(lo, hi)]
        if chunk.lane == m.CPU:
            self.order += serials
        came = len(self.stage.intersection(serials)) * HANDED
        if chunk.stop >= 0:
            handed = tuple((offset, chunk.stop) for offset in range(chunk.size))
            self.stage.update(serials)
            self.held += chunk.size * HANDED - came
            self.peak = max(self.peak, self.held)
            nbytes = chunk.size * HANDED
            self.tell(m.Finished(self.now, chunk.number, chunk.size, chunk.seconds, 0, True, (), handed, nbytes))
            return
        self.stage.difference_update(serials)
        self.held += chunk.size * FINAL - came
        self.ready += chunk.size * FINAL
        self.peak = max(self.peak, self.held)
        self.tell(m.Finished(self.now, chunk.number, chunk.size, chunk.seconds, chunk.size * FINAL))

    def deliver(self) -> int:
        """The consumer takes what there is; how many samples."""
        count = 0
        while self.composed:
            batch = self.composed.pop(0)
            size = sum(hi - lo for lo, hi in batch.spans)
            count += size
            self.held -= size * FINAL
            self.ready -= size * FINAL
            self.tell(m.Asked(self.now))
            self.tell(m.Delivered(self.now, batch.order, in_flight=self.ready))
        return count


def test_what_is_to_be_handed_over_counts_with_what_it_leaves_there() -> None:
    """P4: a device that is behind must not let the CPU pile up intermediate values beyond the budget."""
    budget, slots, samples = 8 * HANDED, 2, 256
    policy = Policy(window=samples, budget_bytes=budget, micro_batch=1)
    driver = Driver(policy, (m.CPU, slots), ("device", 1))
    plans = [(Plan(CUT, 1e-3, 1e-3),)] * 16
    delivered = 0
    for place in range(samples // 16):
        first = TicketId(16 * place)
        driver.tell(m.Admitted(0.0, SourceBatch(place), 0, first, 16, [1.0] * 16, [1.0] * 16, between=plans))
    for _ in range(20 * samples):
        if delivered == samples:
            break
        chunk = next(iter(driver.on(m.CPU)), None) or driver.on("device")[0]  # the CPU is always the faster one
        driver.finish(chunk)
        driver.tell(m.Asked(driver.now))
        delivered += driver.deliver()
    assert delivered == samples
    assert driver.peak <= budget + (slots + 1) * HANDED


def test_until_it_is_known_what_a_hand_over_leaves_no_more_than_the_slots_go_there() -> None:
    ledger = Ledger(1_000_000)
    ledger.start(1)
    ledger.ready(1, 10)
    assert ledger.fits(50, 2) == 50
    assert ledger.fits(50, 2, handing=True) == 2
    ledger.start(1, handing=True)
    assert ledger.fits(50, 2, handing=True) == 1
    ledger.handed(1, 100_000, handing=True)
    assert ledger.fits(50, 2, handing=True) == 8, "nine at 100,010 bytes, of which one lies there already"
    ledger.start(4, handing=True)
    assert ledger.in_flight == 10 + 100_000 + 4 * 100_010
    ledger.stop(4, handing=True)
    assert (ledger.running, ledger.handing) == (0, 0)


def test_what_was_read_and_what_was_handed_over_are_apart() -> None:
    """Else a sample that was handed over would be forgotten with the little that a read one holds."""
    ledger = Ledger(1_000_000)
    ledger.read(100, 1_000)
    ledger.start(1, handing=True)
    ledger.handed(1, 100_000, (1, 0), handing=True)
    assert ledger.in_flight == 990 + 100_000
    ledger.start(1)
    ledger.ready(1, 10, (0, 1))
    assert ledger.in_flight == 990 + 10


def test_tickets_of_a_device_that_is_gone_start_when_they_would_have_on_the_cpu() -> None:
    """In strict order the consumer waits for them, while the CPU prepares what comes after."""
    driver = Driver(Policy(window=64, ahead_s=0.0, micro_batch=8), (m.CPU, 1), ("device", 1))
    device = [1e-3, 9e-3] * 8
    for place in range(4):
        driver.tell(m.Admitted(0.0, SourceBatch(place), 0, TicketId(16 * place), 16, [10e-3] * 16, device))
    sent = driver.on("device")
    given = {serial for chunk in sent for lo, hi in chunk.spans for serial in range(lo, hi)}
    assert given
    driver.tell(m.LaneOpened(0.01, "device", -1, m.DEVICE))
    for chunk in sent:
        del driver.live[chunk.number]
        driver.tell(m.Finished(0.01, chunk.number, 0, 0.0))
    while len(driver.order) < 32:
        driver.finish(driver.on(m.CPU)[0])
    assert given <= set(driver.order), "they are among the oldest"


def test_without_a_device_nothing_waits_for_one() -> None:
    driver = Driver(Policy(window=64), (m.CPU, 1), ("device", 1))
    driver.tell(m.Admitted(0.0, SourceBatch(0), 0, TicketId(0), 16, [10e-3] * 16, [1e-3] * 16))
    router = driver.scheduler._intake.router
    assert router.threshold < float("inf")
    while driver.live:
        driver.finish(driver.live[min(driver.live)])
    driver.tell(m.LaneOpened(1.0, "device", -1, m.DEVICE))
    assert router.threshold == float("inf")


def test_a_look_at_a_chunk_that_has_nothing_left_to_do_is_harmless() -> None:
    """All its samples are reported, and the worker has not said yet that it is through."""
    driver = Driver(Policy(window=64, ahead_s=0.0), (m.CPU, 2))
    driver.tell(m.Admitted(0.0, SourceBatch(0), 0, TicketId(0), 16, [2e-4] * 16, None))
    chunk = driver.on(m.CPU)[0]
    driver.tell(m.Finished(0.01, chunk.number, chunk.size, 0.01, 100, False))
    driver.tell(m.Running(0.05, chunk.number, chunk.size, 0.04))
    driver.tell(m.Tick(0.05))
    assert (driver.scheduler.wake_at() or 1.0) > 0.05


def test_a_slow_sample_is_asked_for_where_a_device_has_a_plan_that_is_sooner_through() -> None:
    driver = Driver(Policy(window=64, ahead_s=0.0), (m.CPU, 1), ("device", 1))
    router = driver.scheduler._intake.router
    entry = entry_of(0, 1, 0, 8e-3, 1.0)
    entry.between = (Plan(2, 2e-3, 5e-3), Plan(3, 4e-3, 2e-3, 4e-3), Plan(4, 6e-3, 1e-3))
    assert router.rescues(entry, 10.0, 0.080) == (2, 3, 4)
    assert router.rescues(entry, 10.0, 0.022) == (4,), "laying down what 3 leaves takes too long"
    entry.stage = 3
    assert router.rescues(entry, 10.0, 0.080) == (4,)
    entry.stage = 4
    assert not router.may_rescue(entry) and router.rescues(entry, 10.0, 0.080) == ()


@pytest.mark.parametrize("slots", [0, 1])
def test_only_a_device_that_is_there_is_asked(slots: int) -> None:
    driver = Driver(Policy(window=64, ahead_s=0.0), (m.CPU, 1), ("device", slots))
    entry = entry_of(0, 1, 0, 8e-3, 1.0)
    entry.between = (Plan(2, 2e-3, 5e-3),)
    assert bool(driver.scheduler._intake.router.rescues(entry, 1.0, 0.1)) == bool(slots)
