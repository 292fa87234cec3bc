"""Samples that loaders of a host prepare for each other: which of them prepares one, and how long it stays.

Loaders with the same data set, pipeline and ``worker_init_fn`` are a *group*, in which a number stands for what a
sample is made of. A loader's ticket comes here once its bytes have been read, and is passed on when the loader is to
prepare the sample itself or has a copy. A sample that several want is *granted* to one of them as it enters that one's
window, and *staged* in memory once it is there, until all have had it; where the budget is used up, what was staged
first goes. So nobody waits for a slow loader: what it has not taken in time it prepares itself, and what it was granted
and does not prepare is granted to another.

The first loader of a group that needs samples is believed, however late it came. Each other one prepares ten samples
itself of which such a loader has sent a copy, and sends their checksums: it is believed, and granted samples and given
copies, once these are the same.

A message wakes a loader, which costs it more than the copy of a sample. So what comes at about the same time is
announced together, unless workers may soon have nothing to do. Decisions only: no socket, and no clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from minato_gpu.memory.arena import Arena
from minato_gpu.sources.blocks import NOWHERE
from minato_gpu.sources.reading import Place
from minato_gpu.sources.sent_samples import SentSample, ask, ask_checksum, place_of
from minato_gpu.sources.service import Ready

UNFINISHED = 8  # samples granted and not prepared, for each worker of a loader
TOGETHER_S = 10e-3  # what comes within this time is announced together
COMPARED = 10  # samples of a loader that must be the same before it is believed
LATE_S = 1.0  # beyond what preparing usually takes
_LOOK_S = 0.25
_UNUSED = 128  # samples in a row that are staged although nobody is known to want them: jobs may be about to begin
_ALONE = 64  # tickets beyond the window that a loader alone in its group may have
_DIFFERENT = "a sample that two loaders have prepared is not the same, bit for bit"
_LEARNED = 16  # samples whose cost is known before it is judged
_SENDING_S, _BYTES_PER_S = 0.5e-3, 2e9  # what sharing a sample takes, about: so long, and so many bytes a second


@dataclass(slots=True, eq=False)
class SharedSample:
    """A sample that tickets want, or that is staged in memory."""

    group: SampleGroup
    number: int  # see ``source.prepared_key``
    wanted: dict[Sharer, list[int]] = field(default_factory=dict)  # tickets of each loader that wants it
    owner: Sharer | None = None  # loader whose workers prepare it for all
    since: float = 0.0  # when it was granted
    begun: bool = False  # somebody has prepared it, or is about to
    block: int = NOWHERE  # block in which it is staged
    nbytes: int = 0
    checksum: int | None = None  # checksum from a loader that is believed; None until there is one
    had: int = 0  # tickets that have been released

    @property
    def is_staged(self) -> bool:
        """True if there is a copy."""
        return self.block != NOWHERE

    def forget(self) -> None:
        """Removes the sample from its group if no ticket wants it and it is not staged."""
        if not self.wanted and not self.is_staged:
            self.group.samples.pop(self.number, None)


class SampleGroup:
    """Loaders that prepare the same samples. ``why_not``: why they share none any more, in words; "": they do."""

    def __init__(self) -> None:
        self.members: list[Sharer] = []
        self.samples: dict[int, SharedSample] = {}
        self.why_not = ""
        self.usual_s = 0.0  # from grant to copy
        self.unused = 0  # samples staged for nobody since somebody has had one
        self._known = 0
        self._prepare_s = self._nbytes = 0.0

    def observe(self, sent: SentSample, seconds: float) -> None:
        """Learns from a sample that has come, ``seconds`` after it was granted. Sets ``why_not`` if samples take less
        to prepare than to share."""
        self._known += 1
        weight = 1 / min(self._known, 100)
        self.usual_s += weight * (seconds - self.usual_s)
        self._prepare_s += weight * (sent.prepare_s - self._prepare_s)
        self._nbytes += weight * (sent.nbytes - self._nbytes)
        sharing_s = _SENDING_S + self._nbytes / _BYTES_PER_S
        if self._known >= _LEARNED and self._prepare_s < sharing_s:
            self.why_not = f"preparing one takes {1e3 * self._prepare_s:.2f} ms, and sharing it {1e3 * sharing_s:.2f}"

    def settle(self, now: float) -> None:
        """Passes on all tickets that need not wait, then grants samples, one to each loader in turn."""
        for one in self.members:
            one.settle(now)
        granting = [one.grants() for one in self.members if not self.why_not]
        while granting:
            granting = [grants for grants in granting if next(grants, False)]


class PreparedSamples:
    """The staged samples of all groups, ``budget`` bytes at most, in an arena for them alone. ``later`` calls a
    function as an event loop's ``call_later`` does; ``now`` returns the time in seconds."""

    def __init__(
        self,
        budget: int,
        arena: Arena,
        later: Callable[[float, Callable[[], None]], object],
        now: Callable[[], float],
    ) -> None:
        self.budget, self.arena, self.now = budget, arena, now
        self._later = later
        self._groups: dict[str, SampleGroup] = {}
        self._staged: dict[SharedSample, None] = {}  # in the order in which they came
        self._nbytes = 0
        self._due = math.inf  # when this decides next, at the latest
        self._watches = False

    def join(self, fingerprint: str, workers: int, pass_on: Callable[[Ready], None]) -> Sharer:
        """Adds a loader with so many workers to the group of this fingerprint; its tickets go on by ``pass_on``."""
        group = self._groups.setdefault(fingerprint, SampleGroup())
        sharer = Sharer(self, group, workers, pass_on)
        group.members.append(sharer)
        return sharer

    def leave(self, sharer: Sharer) -> None:
        """Forgets a loader that has left; a group's last one takes the staged samples with it. Free memory goes back to
        the system."""
        sharer.drop()
        members = sharer.group.members
        members.remove(sharer)
        if not members:
            self.drop([sample for sample in self._staged if sample.group is sharer.group])
        self._groups = {name: group for name, group in self._groups.items() if group.members}
        self.arena.trim()
        self.look()

    def look(self) -> None:
        """Has it decided anew who may prepare what, as something has changed: after this call where workers may soon
        have nothing to do, else within ``TOGETHER_S``."""
        is_short = any(one.is_short for group in self._groups.values() for one in group.members)
        due = self.now() + (0.0 if is_short else TOGETHER_S)
        if due < self._due:
            self._due = due
            self._later(due - self.now(), self._settle)

    def _settle(self) -> None:
        self._due = math.inf
        for group in self._groups.values():
            if group.why_not:
                self.drop([sample for sample in group.samples.values() if sample.is_staged])
            group.settle(self.now())
        if not self._watches and any(one.granted for group in self._groups.values() for one in group.members):
            self._watches = True
            self._later(_LOOK_S, self._watch)

    def _watch(self) -> None:
        self._watches = False
        self._settle()

    def stage(self, sample: SharedSample, sent: SentSample) -> None:
        """Stages a sample that has come, unless the arena has no room; the oldest staged go while the budget is
        exceeded."""
        try:
            block = self.arena.allocate(sent.nbytes)
        except MemoryError:
            return
        sent.fill(self.arena.buffer[block : block + sent.nbytes])
        sample.block, sample.nbytes = block, sent.nbytes
        self._staged[sample] = None
        self._nbytes += sent.nbytes
        while self._nbytes > self.budget:
            self.drop([next(iter(self._staged))])

    def drop(self, samples: Iterable[SharedSample]) -> None:
        """Frees the memory of these staged samples."""
        for sample in samples:
            del self._staged[sample]
            self._nbytes -= sample.nbytes
            self.arena.free(sample.block)
            sample.block = NOWHERE
            sample.forget()


class Sharer:
    """One loader: its tickets, and what it prepares or has from others. ``pass_on`` gives a ticket to it."""

    def __init__(
        self, shared: PreparedSamples, group: SampleGroup, workers: int, pass_on: Callable[[Ready], None]
    ) -> None:
        self.group = group
        self.believed = False  # others take what it prepares
        self.granted: dict[SharedSample, None] = {}  # samples granted and not prepared
        self.is_late = False  # it is late with a sample that was granted
        self.there: set[int] = set()  # tickets that were passed on, and are not released
        self._shared, self._workers, self._pass_on = shared, workers, pass_on
        self._wants: dict[int, SharedSample] = {}
        self._ready: dict[int, Ready] = {}  # tickets whose bytes have arrived, and that are not passed on
        self._ahead: list[int] = []  # heap of those of shared samples that were not in the window yet
        # those of shared samples that are in the window, with their samples
        self._waiting: dict[int, SharedSample] = {}
        self._comparing: set[SharedSample] = set()  # samples that it prepares although there is a copy, to be compared
        self._equal = 0  # samples that were equal to those of a loader that is believed
        self._admitted = 0
        self.count_anew()

    def count_anew(self) -> None:
        """Counts from zero."""
        self.granted_count = 0  # samples prepared for all
        self.copied = 0  # had from others
        self.again = 0  # prepared although another had, or had begun to

    def counts(self) -> dict[str, int | str]:
        """Returns ``stats()["share"]``."""
        counts: dict[str, int | str] = {"granted": self.granted_count, "copied": self.copied, "again": self.again}
        return counts | {"loaders": len(self.group.members), "why_not": self.group.why_not}

    # --- what the loader says --------------------------------------------------------------------------------

    def want(self, ticket: int, number: int) -> None:
        """Notes that a ticket is of the sample ``number`` (see ``prepared_key``), unless the group shares none any
        more."""
        if self.group.why_not:
            return
        sample = self.group.samples.get(number)
        if sample is None:
            sample = self.group.samples[number] = SharedSample(self.group, number)
        sample.wanted.setdefault(self, []).append(ticket)
        self._wants[ticket] = sample

    def ready(self, ready: Ready) -> None:
        """Takes a ticket whose bytes are there: one of a shared sample waits here, any other is passed on at once."""
        ticket = ready[0]
        self._ready[ticket] = ready
        if ticket in self._wants:
            heapq.heappush(self._ahead, ticket)
            self._shared.look()
        else:
            self._pass(ticket)

    def admit(self, end: int) -> None:
        """Notes that tickets below ``end`` are in the window. If no loader of the group is believed yet, this one
        is."""
        self._admitted = end
        self.believed = self.believed or not any(one.believed for one in self.group.members)
        self._shared.look()

    def release(self, tickets: Iterable[int]) -> None:
        """Forgets tickets whose samples have been prepared, or are not wanted any more."""
        for ticket in tickets:
            self._ready.pop(ticket, None)
            self._waiting.pop(ticket, None)
            self.there.discard(ticket)
            sample = self._wants.pop(ticket, None)
            if sample is not None:
                self._leave(ticket, sample)
        self._shared.look()

    def _leave(self, ticket: int, sample: SharedSample) -> None:
        """Ends a ticket's interest in a sample."""
        self._finish(sample)
        self._comparing.discard(sample)
        sample.wanted[self].remove(ticket)
        if not sample.wanted[self]:
            del sample.wanted[self]
        sample.had += 1
        if not sample.wanted and sample.is_staged and sample.had >= max(2, len(self.group.members)):
            self._shared.drop([sample])
        sample.forget()

    def _finish(self, sample: SharedSample) -> None:
        """Ends a grant; unless the sample has come, another loader is to prepare it."""
        self.granted.pop(sample, None)
        self.is_late = self.is_late and bool(self.granted)
        if sample.owner is self:
            sample.owner = None

    def leave(self) -> None:
        """Notes that the loader has left."""
        self._shared.leave(self)

    def drop(self) -> None:
        """Forgets all tickets, and which are in the window; the loader stays in its group."""
        self.release([*self._wants, *self.there])
        self._ahead, self._admitted = [], 0

    def receive(self, sent: SentSample) -> None:
        """Takes in a worker's message about a sample; its file is the caller's to close."""
        group, sample = self.group, self.group.samples.get(sent.number)
        if sent.why_not:
            group.why_not = group.why_not or sent.why_not
        elif sent.is_gone:
            self.again += 1
        elif sample is not None and sample in self.granted:
            self._take(sample, sent)
        elif sample is not None and sample.checksum is not None:
            self._compare(sample, sent.checksum)
        self._shared.look()

    def _take(self, sample: SharedSample, sent: SentSample) -> None:
        """Takes a sample that was granted."""
        shared, group = self._shared, self.group
        group.observe(sent, shared.now() - sample.since)
        self._finish(sample)
        if sent.nbytes > shared.budget:
            group.why_not = f"one of {sent.nbytes} bytes is more than the share_budget of {shared.budget}"
        if sample.checksum not in (None, sent.checksum):  # another loader was late with it, and has sent it since
            group.why_not = group.why_not or _DIFFERENT
        sample.checksum = sent.checksum
        if sent.file >= 0 and not group.why_not and not sample.is_staged:
            shared.stage(sample, sent)

    def _compare(self, sample: SharedSample, checksum: int) -> None:
        """Compares a sample that this loader has prepared with that of one that is believed."""
        self._comparing.discard(sample)
        self._equal += checksum == sample.checksum
        self.believed = self.believed or self._equal >= COMPARED
        if checksum != sample.checksum:
            self.group.why_not = self.group.why_not or _DIFFERENT

    # --- what becomes of its tickets -------------------------------------------------------------------------

    @property
    def is_short(self) -> bool:
        """True if its workers may soon have nothing to do."""
        comes = self._ahead and self._ahead[0] < self._admitted
        return len(self.granted) <= self._workers and bool(self._waiting or comes)

    def waits_for(self, sample: SharedSample) -> bool:
        """Returns whether a ticket of this loader, which wants the sample, is in the window and waits for it."""
        return any(ticket in self._waiting for ticket in sample.wanted[self])

    def settle(self, now: float) -> None:
        """Passes on all tickets of which there is a copy, or that are not shared; gives up samples that are late."""
        group, alone = self.group, len(self.group.members) == 1
        for sample in self.granted:
            if sample.owner is self and now - sample.since > LATE_S + group.usual_s:
                sample.owner, self.is_late = None, True
        end = self._admitted + (_ALONE if alone and group.unused >= _UNUSED else 0)
        while self._ahead and (self._ahead[0] < end or group.why_not):
            ticket = heapq.heappop(self._ahead)
            if ticket in self._ready:
                self._waiting[ticket] = self._wants[ticket]
        for ticket, sample in [*self._waiting.items()]:
            if group.why_not:
                self._pass(ticket)
            elif not self.believed and sample.is_staged and self._equal + len(self._comparing) < COMPARED:
                self._comparing.add(sample)
                self._prepare_alone(ticket, sample)
            elif self.believed and sample.is_staged and sample.checksum is not None:
                self.group.unused = 0
                self.copied += 1
                self._pass(ticket, place_of(sample.number, sample.block, sample.nbytes, sample.checksum))

    def grants(self) -> Iterator[bool]:
        """Grants samples that nobody has, or is about to have: one whenever it is asked to go on. Passes on, ungranted,
        tickets whose samples the loader is to prepare for itself alone."""
        for ticket, sample in [*self._waiting.items()]:
            if sample.owner is None and not sample.is_staged and sample not in self.granted:
                if self.believed:
                    yield from self._grant(ticket, sample)
                elif not any(one.believed and not one.is_late and one.waits_for(sample) for one in sample.wanted):
                    self._prepare_alone(ticket, sample)

    def _grant(self, ticket: int, sample: SharedSample) -> Iterator[bool]:
        group, wanted = self.group, len(sample.wanted) > 1
        if self.is_late or (not wanted and (sample.begun or group.unused >= _UNUSED)):
            self._prepare_alone(ticket, sample)
        elif len(self.granted) < UNFINISHED * self._workers:
            self.granted[sample] = None
            sample.owner, sample.since = self, self._shared.now()
            group.unused += not wanted
            self.granted_count += 1
            self.again += sample.begun
            sample.begun = True
            self._pass(ticket, ask(sample.number))
            yield True

    def _prepare_alone(self, ticket: int, sample: SharedSample) -> None:
        self.again += sample.begun
        sample.begun = True
        self._pass(ticket, *(() if self.believed else (ask_checksum(sample.number),)))

    def _pass(self, ticket: int, *more: Place) -> None:
        _, places = self._ready.pop(ticket)
        self._waiting.pop(ticket, None)
        self.there.add(ticket)
        self._pass_on((ticket, (*places, *more)))
