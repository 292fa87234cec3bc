"""A shell around the scheduler that a test drives by hand, and a simple model of what must hold after every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minato_gpu.samples import OutputBatch, SourceBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.plans import Plan
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler
from minato_gpu.scheduling.spans import Span, TicketSpan
from tests.support.tickets import spans

SAMPLE_BYTES = 100
CUTS = (2, 3)  # stages before which samples may be handed over


class Shell:
    """Keeps what the lanes hold, what was composed and what was delivered, and checks every instruction."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.scheduler = Scheduler(policy)
        self.now = 0.0
        self.lanes: dict[str, int] = {}
        self.most_slots = 0
        self.lost_slots = False
        self.held: dict[int, m.Chunk] = {}  # chunks that lanes hold
        self.done: dict[int, int] = {}
        self.begun: set[int] = set()
        self.asked: dict[int, tuple[int, ...]] = {}  # chunks whose sample is to be handed over, and where
        self.offered: dict[int, set[int]] = {}  # by serial, the split points that there were plans for
        self.place_of: list[int] = []  # serial -> place
        self.sizes: list[int] = []  # place -> samples
        self.epoch_of: list[int] = []  # place -> epoch
        self.home_of: list[str] = []  # place -> the side of the device lane that may have it
        self.unfetched: set[int] = set()  # admitted, and their bytes are not there
        self.ready: set[int] = set()
        self.stage: dict[int, int] = {}  # of the samples that were handed over, by serial
        self.failed: set[int] = set()
        self.wants = False  # the consumer has asked and got nothing yet
        self.composed: dict[int, m.Compose] = {}
        self.delivered: list[m.Compose] = []
        self.log: list[tuple[m.Event, list[m.Instruction]]] = []

    def tell(self, event: m.Event) -> None:
        """Hand over the event and do what the scheduler says."""
        instructions = self.scheduler.handle(event)
        self.log.append((event, instructions))
        for instruction in instructions:
            if isinstance(instruction, m.Dispatch):
                self._dispatched(instruction.chunk)
            elif isinstance(instruction, m.Compose):
                self._composed(instruction)
            elif isinstance(instruction, m.HandOver):
                assert self.held[instruction.chunk].lane == m.CPU == instruction.lane
                last = _serials(self.held[instruction.chunk].spans)[-1]
                assert instruction.splits and self.offered[last].issuperset(instruction.splits)
                self.asked[instruction.chunk] = instruction.splits
            else:
                self.revoke(instruction)

    def tick(self) -> float:
        """Time goes on."""
        self.now += 0.01
        return self.now

    # --- events -----------------------------------------------------------------------------------------------

    def open(self, lane: str, slots: int) -> None:
        """Slots come or go."""
        self.lanes[lane] = self.lanes.get(lane, 0) + slots
        self.most_slots = max(self.most_slots, sum(self.lanes.values()))
        self.lost_slots = self.lost_slots or slots < 0
        self.tell(m.LaneOpened(self.tick(), lane, slots, m.CPU if lane == m.CPU else m.DEVICE))

    def admit(
        self,
        size: int,
        epoch: int,
        cpu: Sequence[float] | None = None,
        device: Sequence[float] | None = None,
        between: Sequence[Sequence[Plan]] | None = None,
        fetched: Sequence[TicketSpan] | None = None,
    ) -> None:
        """The sampler's next batch; ``fetched``: those of its serials whose bytes are there, counted from its first."""
        place, first = len(self.sizes), len(self.place_of)
        self.sizes.append(size)
        self.epoch_of.append(epoch)
        home = self.policy.homes[(place - self.epoch_of.index(epoch)) % len(self.policy.homes)]
        self.home_of.append(home)
        self.place_of += [place] * size
        for serial, plans in enumerate(between or (), start=first):
            self.offered[serial] = {plan.split for plan in plans}
        if fetched is not None:
            fetched = [(TicketId(first + lo), TicketId(first + hi)) for lo, hi in fetched]
            self.unfetched.update(set(range(first, first + size)).difference(_serials(fetched)))
        what = SourceBatch(place), epoch, TicketId(first), size, cpu, device
        self.tell(m.Admitted(self.tick(), *what, between=between, home=home, fetched=fetched))
        assert len(self.place_of) - sum(_size(batch) for batch in self.delivered) <= self.policy.window

    def fetch(self, serials: Sequence[int], *, copies: bool = False) -> None:
        """The bytes of these have come, or ``copies``; neighbours of one place are told together."""
        spans: list[TicketSpan] = []
        for serial in sorted(serials):
            lo, hi = spans[-1] if spans else (-1, -1)
            if hi == serial and self.place_of[lo] == self.place_of[serial]:
                spans[-1] = TicketId(lo), TicketId(serial + 1)
            else:
                spans.append((TicketId(serial), TicketId(serial + 1)))
        self.unfetched.difference_update(serials)
        self.tell(m.Fetched(self.tick(), [], spans) if copies else m.Fetched(self.tick(), spans))

    def finish(self, number: int, upto: int, failed: tuple[int, ...] = (), heeds: bool = True) -> None:
        """The lane has the first ``upto`` samples of a chunk ready; all of them: it is through.

        Those of a chunk with a stop are handed over there; so is, at the next of the cuts named if the worker ``heeds``
        it, the last one of a chunk that was told to.
        """
        chunk, before = self.held[number], self.done[number]
        final = upto == chunk.size
        serials = _serials(chunk.spans)
        handed = {}
        for offset in range(before, upto):
            serial = serials[offset]
            later = [cut for cut in self.asked.get(number, ()) if cut > self.stage.get(serial, 0)]
            if offset in failed:
                continue
            if chunk.stop >= 0:
                handed[offset] = chunk.stop
            elif heeds and later and offset == chunk.size - 1:
                handed[offset] = min(later)
        for offset, stage in handed.items():
            assert stage > self.stage.get(serials[offset], 0), "a stage would be applied twice"
            self.stage[serials[offset]] = stage
        self.ready.update(serials[offset] for offset in range(before, upto) if offset not in handed)
        self.failed.update(serials[offset] for offset in failed)
        self.done[number] = upto
        if final:
            self._forget(number)
        nbytes, held = SAMPLE_BYTES * (upto - before - len(handed)), SAMPLE_BYTES * len(handed)
        pairs = tuple(handed.items())
        self.tell(m.Finished(self.tick(), number, upto, 0.01, nbytes, final, failed, pairs, held))

    def give_back(self, number: int) -> None:
        """The worker was lost: what it had not finished goes back."""
        done = self.done[number]
        self._forget(number)
        self.tell(m.Finished(self.tick(), number, done, 0.0))

    def lose(self, number: int, settled: Span = (0, 0)) -> None:
        """A worker died at the chunk; samples ``settled`` are given up, the first of them as an error."""
        chunk = self.held[number]
        lo, hi = settled
        serials = _serials(chunk.spans)[lo:hi]
        self.ready.update(serials)
        self.failed.update(serials[:1])
        self.lanes[chunk.lane] -= 1
        self.lost_slots = True
        self._forget(number)
        failed = (lo,) if serials else ()
        self.tell(m.Lost(self.tick(), chunk.lane, number, settled, failed, SAMPLE_BYTES * len(serials)))

    def look(self) -> None:
        """Report every chunk that has begun, its next sample having run for a second."""
        for number in sorted(self.begun):
            chunk = self.held.get(number)
            if chunk is not None and chunk.kind == "run":
                self.tell(m.Running(self.tick(), number, self.done[number], 1.0))
        self.tell(m.Tick(self.tick()))

    def revoke(self, instruction: m.Revoke) -> None:
        """The lane lets go of what it has not begun."""
        chunk = self.held[instruction.chunk]
        assert instruction.keep > self.done[instruction.chunk]
        if instruction.keep < chunk.size:
            kept = _serials(chunk.spans)[: instruction.keep]
            self.held[chunk.number] = replace(chunk, spans=spans(*((serial, serial + 1) for serial in kept)))
            self.tell(m.Revoked(self.tick(), instruction.chunk, instruction.keep))

    def ask(self) -> bool:
        """The consumer wants a batch; whether it got one."""
        order = len(self.delivered)
        if order not in self.composed:
            self.wants = True
            self.tell(m.Asked(self.tick()))
        if order not in self.composed:
            return False
        self.wants = False
        self.delivered.append(self.composed.pop(order))
        left = SAMPLE_BYTES * (len(self.ready) - len(self.delivered_serials()))
        self.tell(m.Delivered(self.tick(), OutputBatch(order), in_flight=left))
        return True

    # --- checks -----------------------------------------------------------------------------------------------

    def _dispatched(self, chunk: m.Chunk) -> None:
        assert self.lanes.get(chunk.lane, 0) > 0
        assert chunk.stop < 0 or chunk.lane == m.CPU
        taken = {serial for at, held in self.held.items() for serial in _serials(held.spans)[self.done[at] :]}
        for serial in _serials(chunk.spans):
            assert serial not in taken
            assert serial not in self.unfetched
            assert serial not in self.ready
            if self.policy.pins and chunk.lane != m.CPU:
                assert chunk.lane == self.home_of[self.place_of[serial]]
        assert len({self.epoch_of[self.place_of[serial]] for serial in _serials(chunk.spans)}) == 1
        self.held[chunk.number] = chunk
        self.done[chunk.number] = 0
        running = sum(1 for held in self.held.values() if held.lane == chunk.lane)
        if running <= self.lanes[chunk.lane]:
            self.begun.add(chunk.number)

    def _composed(self, batch: m.Compose) -> None:
        assert batch.order not in self.composed
        serials = _serials(batch.spans)
        assert self.ready.issuperset(serials)
        assert set(batch.failed) == self.failed & set(serials)
        assert {self.epoch_of[self.place_of[serial]] for serial in serials} == {self.epoch_of[batch.order]}
        if self.policy.max_lateness and not self.ready.issuperset(range(serials[0])):
            assert self.wants or len(self.composed) < self.policy.compose_ahead, "overtakes, and nobody waits"
        for serial in serials:
            late = batch.order - self.place_of[serial]
            assert late <= self.policy.max_lateness
        if self.policy.fixed:
            assert len({self.place_of[serial] for serial in serials}) == 1
            assert len(serials) == self.sizes[self.place_of[serials[0]]]
        else:
            assert len(serials) == self.sizes[batch.order]
        if self.policy.max_lateness == 0:
            assert {self.place_of[serial] for serial in serials} == {batch.order}
        self.composed[batch.order] = batch

    def _forget(self, number: int) -> None:
        del self.held[number], self.done[number]
        self.begun.discard(number)
        waiting = sorted(set(self.held) - self.begun)
        for lane, slots in self.lanes.items():
            begun = sum(1 for at in self.begun if self.held[at].lane == lane)
            for at in [w for w in waiting if self.held[w].lane == lane][: max(0, slots - begun)]:
                self.begun.add(at)

    def delivered_serials(self) -> list[int]:
        """All serials delivered so far, in order."""
        return [serial for batch in self.delivered for serial in _serials(batch.spans)]

    def waiting_on(self) -> int:
        """Samples that were handed over and are not ready."""
        return len(self.stage.keys() - self.ready)

    def drain(self) -> None:
        """The consumer takes all, and lanes finish what they hold, the newest first, until every admitted sample is
        delivered."""
        if self.lanes.get(m.CPU, 0) < 1:
            self.open(m.CPU, 1)
        self.fetch(sorted(self.unfetched))
        for _ in range(30 * len(self.place_of) + 20):
            if len(self.delivered_serials()) == len(self.place_of):
                break
            if self.ask():
                continue
            assert self.held, f"deadlock: {self.scheduler.stall_cause()}"
            number = max(self.begun, default=min(self.held), key=lambda at: self.held[at].spans[0])
            self.finish(number, self.held[number].size)
        assert sorted(self.delivered_serials()) == list(range(len(self.place_of)))
        assert not self.held


def _serials(spans: Sequence[Span]) -> list[int]:
    return [serial for lo, hi in spans for serial in range(lo, hi)]


def _size(batch: m.Compose) -> int:
    return sum(hi - lo for lo, hi in batch.spans)
