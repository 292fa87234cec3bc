"""Samples that loaders of a host prepare for each other: which of them prepares one, and how long it stays.

Loaders with the same data set, pipeline and ``worker_init_fn`` are a *group*, in which a number stands for what a
sample is made of. A loader's ticket comes here once its bytes have been read, and is passed on when the loader is to
prepare the sample itself or has a copy. A sample that several want is *granted* to one of them as it enters that one's
window, and *staged* in memory once it is there, until all have had it; where the budget is used up, what was staged
first goes. So nobody waits for a loader that is slow: what it has not taken in time it prepares itself, and what
it has been granted and does not prepare is granted to another.

The first loader of a group is believed. Of each other one the first samples are prepared twice, by it and by one that
is believed, and compared. No socket, no clock of its own: it is told the time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from minato_gpu.sources.blocks import ASKED, NOWHERE, Blocks
from minato_gpu.sources.fields import Received
from minato_gpu.sources.reading import Place
from minato_gpu.sources.service import Ready
from minato_gpu.sources.source import PREPARED

UNFINISHED = 4  # samples granted and not prepared, for each worker of a loader
COMPARED = 10  # samples of a loader that must be the same before it is believed
LATE_S = 1.0  # beyond what preparing usually takes
_LOOK_S = 0.25
_UNUSED = 128  # samples in a row that are staged although nobody is known to want them: jobs may be about to begin
_ALONE = 64  # tickets beyond the window that a loader alone in its group may have
_LEARNED = 16  # samples whose cost is known before it is judged
_SENDING_S, _BYTES_PER_S = 0.5e-3, 1e9  # what sharing a sample takes, about: so long, and so many bytes a second


@dataclass(slots=True, eq=False)
class SharedSample:
    """A sample that somebody wants, or that is staged. ``block``: where; ``had``: tickets that have had it."""

    group: SampleGroup
    number: int
    wanted: dict[Sharer, list[int]] = field(default_factory=dict)  # by these tickets of each
    owner: Sharer | None = None  # whose workers prepare it for all
    since: float = 0.0  # when it was granted
    begun: bool = False  # somebody has prepared it, or is about to
    block: int = NOWHERE
    nbytes: int = 0
    stamp: int = 0
    by: Sharer | None = None  # whose workers have prepared it
    had: int = 0

    def forget(self) -> None:
        """Removes it from its group, if it is of use to nobody."""
        if not self.wanted and self.block == NOWHERE:
            self.group.samples.pop(self.number, None)


class SampleGroup:
    """Loaders that prepare the same samples. ``why_not``: they share none any more, in words."""

    def __init__(self) -> None:
        self.members: list[Sharer] = []
        self.samples: dict[int, SharedSample] = {}
        self.why_not = ""
        self.usual_s = 0.0  # from grant to copy
        self.unused = 0  # samples staged for nobody since somebody has had one
        self._known = 0
        self._prepare_s = self._nbytes = 0.0

    def observe(self, nbytes: int, prepare_s: float, seconds: float) -> None:
        """A sample has come, ``seconds`` after it was granted."""
        self._known += 1
        weight = 1 / min(self._known, 100)
        self.usual_s += weight * (seconds - self.usual_s)
        self._prepare_s += weight * (prepare_s - self._prepare_s)
        self._nbytes += weight * (nbytes - self._nbytes)
        sharing_s = _SENDING_S + self._nbytes / _BYTES_PER_S
        if self._known >= _LEARNED and self._prepare_s < sharing_s:
            self.why_not = f"preparing one takes {1e3 * self._prepare_s:.2f} ms, and sharing it {1e3 * sharing_s:.2f}"

    def look(self, now: float) -> bool:
        """Takes samples that are late from those they were granted to; returns whether any is to be looked at again."""
        owned = [(one, sample) for one in self.members for sample in one.granted if sample.owner is one]
        for one, sample in owned:
            if now - sample.since > LATE_S + self.usual_s:
                sample.owner, one.is_late = None, True
        return bool(owned)


class PreparedSamples:
    """Those of all groups, ``budget`` bytes at most. ``soon`` calls a function a little later, and ``later`` after so
    many seconds, as an event loop's ``call_soon`` and ``call_later`` do; ``now``: the time."""

    def __init__(
        self,
        budget: int,
        blocks: Blocks,
        soon: Callable[[Callable[[], None]], object],
        later: Callable[[float, Callable[[], None]], object],
        now: Callable[[], float],
    ) -> None:
        self.budget, self.now = budget, now
        self._blocks, self._soon, self._later = blocks, soon, later
        self._groups: dict[str, SampleGroup] = {}
        self._staged: dict[SharedSample, None] = {}  # in the order in which they came
        self._nbytes = 0
        self._is_due = self._looks = False

    def join(self, fingerprint: str, workers: int, pass_on: Callable[[Ready], None]) -> Sharer:
        """A loader's part, whose tickets go on by ``pass_on``."""
        group = self._groups.setdefault(fingerprint, SampleGroup())
        sharer = Sharer(self, group, workers, pass_on)
        group.members.append(sharer)
        return sharer

    def leave(self, sharer: Sharer) -> None:
        """The loader has left."""
        sharer.drop()
        members = sharer.group.members
        members.remove(sharer)
        if not members:
            self.drop([sample for sample in self._staged if sample.group is sharer.group])
        if members and not any(one.believed for one in members):
            members[0].believed = True
        self._groups = {name: group for name, group in self._groups.items() if group.members}
        self.look()

    def look(self) -> None:
        """Something has changed: see soon who may prepare what."""
        if not self._is_due:
            self._is_due = True
            self._soon(self._settle)

    def _settle(self) -> None:
        self._is_due = False
        for group in self._groups.values():
            if group.why_not:
                self.drop([sample for sample in group.samples.values() if sample.block != NOWHERE])
            for sharer in group.members:
                sharer.settle()
        if not self._looks:
            self._look()

    def _look(self) -> None:
        """Looks for what is late, now and while anything is granted."""
        now = self.now()
        self._looks = sum(group.look(now) for group in self._groups.values()) > 0
        if self._looks:
            self._later(_LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._look()
        self.look()

    def stage(self, sample: SharedSample, found: Received, by: Sharer) -> None:
        """Keeps what has come of a sample, as far as there is room."""
        try:
            block, view = self._blocks.allocate(found.nbytes)
        except MemoryError:
            return
        found.fill(view)
        sample.block, sample.nbytes, sample.stamp = block, found.nbytes, self._blocks.publish(block)
        sample.by = by
        self._staged[sample] = None
        self._nbytes += found.nbytes
        while self._nbytes > self.budget:
            self.drop([next(iter(self._staged))])

    def drop(self, samples: Iterable[SharedSample]) -> None:
        """These stay no longer."""
        for sample in samples:
            del self._staged[sample]
            self._nbytes -= sample.nbytes
            self._blocks.free(sample.block)
            sample.block = NOWHERE
            sample.forget()


class Sharer:
    """One loader's part: its tickets, and what of theirs it may prepare. ``believed``: what it prepares others take
    without a look. ``granted_count``, ``copied`` and ``again``: samples that it prepared for all, had from others, and
    prepared although another had, or had begun to."""

    def __init__(
        self, shared: PreparedSamples, group: SampleGroup, workers: int, pass_on: Callable[[Ready], None]
    ) -> None:
        self.group, self.believed = group, not group.members
        self.granted: set[SharedSample] = set()  # and not prepared
        self.is_late = False  # with one of these
        self.there: set[int] = set()  # tickets that were passed on, and are not released
        self._shared, self._workers, self._pass_on = shared, workers, pass_on
        self._wants: dict[int, SharedSample] = {}
        self._ready: dict[int, Ready] = {}  # whose bytes are there, not passed on
        self._ahead: list[int] = []  # of these a heap of those that were not in the window,
        self._waiting: dict[int, SharedSample] = {}  # and the others
        self._comparing: dict[int, Sharer] = {}  # tickets that are compared, each for the one that is not believed
        self.equal = self.compared = 0  # samples for its sake: that were the same, and on which it is waited
        self._admitted = 0
        self.count_anew()

    def count_anew(self) -> None:
        """Counts from zero."""
        self.granted_count = self.copied = self.again = 0

    def counts(self) -> dict[str, int | str]:
        """See ``DataLoader.stats``."""
        counts: dict[str, int | str] = {"granted": self.granted_count, "copied": self.copied, "again": self.again}
        return counts | {"loaders": len(self.group.members), "why_not": self.group.why_not}

    # --- what the loader says --------------------------------------------------------------------------------

    def want(self, ticket: int, number: int) -> None:
        """The ticket is of this sample."""
        if self.group.why_not:
            return
        sample = self.group.samples.get(number)
        if sample is None:
            sample = self.group.samples[number] = SharedSample(self.group, number)
        sample.wanted.setdefault(self, []).append(ticket)
        self._wants[ticket] = sample

    def ready(self, ready: Ready) -> None:
        """The bytes of a ticket's sources are there."""
        ticket = ready[0]
        self._ready[ticket] = ready
        if ticket in self._wants:
            heapq.heappush(self._ahead, ticket)
            self._shared.look()
        else:
            self._pass(ticket)

    def admit(self, end: int) -> None:
        """Tickets below ``end`` are in the window."""
        self._admitted = end
        self._shared.look()

    def release(self, tickets: Iterable[int]) -> None:
        """The samples have been prepared, or nobody wants them any more."""
        for ticket in tickets:
            self.there.discard(ticket)
            self._ready.pop(ticket, None)
            self._waiting.pop(ticket, None)
            sample = self._wants.pop(ticket, None)
            if sample is not None:
                self._leave(ticket, sample)
            self._end_comparison(ticket, equal=1)
        self._shared.look()

    def _end_comparison(self, ticket: int, equal: int) -> None:
        other = self._comparing.pop(ticket, None)
        if other is not None:
            other.compared -= 1
            other.equal += equal
            other.believed = other.believed or other.equal >= COMPARED

    def _leave(self, ticket: int, sample: SharedSample) -> None:
        """The ticket wants it no more."""
        self._finish(sample)
        sample.wanted[self].remove(ticket)
        if not sample.wanted[self]:
            del sample.wanted[self]
        sample.had += 1
        if not sample.wanted and sample.block != NOWHERE and sample.had >= max(2, len(self.group.members)):
            self._shared.drop([sample])
        sample.forget()

    def _finish(self, sample: SharedSample) -> None:
        """This loader is through with it: another is to prepare it for the others, unless it has come."""
        if sample in self.granted:
            self.granted.remove(sample)
            self.is_late = False
        if sample.owner is self:
            sample.owner = None

    def drop(self) -> None:
        """Nothing of what was wanted is wanted any more."""
        for ticket in [*self._comparing]:
            self._end_comparison(ticket, equal=0)
        self.release([*self._wants, *self.there])
        self._ahead, self._admitted = [], 0

    def receive(self, found: Received) -> None:
        """A worker has sent a sample that it was asked for, or why not; or nothing, where it found no copy."""
        shared, group, sample = self._shared, self.group, self.group.samples.get(found.sample)
        if found.why_not:
            group.why_not = group.why_not or found.why_not
        elif found.file < 0:
            self.again += 1
            for ticket in [ticket for ticket in self._comparing if self._wants[ticket].number == found.sample]:
                self._end_comparison(ticket, equal=0)
        elif found.nbytes > shared.budget:
            group.why_not = f"one of {found.nbytes} bytes is more than the share_budget of {shared.budget}"
        elif sample is not None:
            if sample in self.granted:
                group.observe(found.nbytes, found.prepare_s, shared.now() - sample.since)
            self._finish(sample)
            if sample.block == NOWHERE:
                shared.stage(sample, found, self)
        shared.look()

    # --- what becomes of its tickets -------------------------------------------------------------------------

    def waits_for(self, sample: SharedSample) -> bool:
        """Returns whether a ticket in the window waits for it."""
        return any(ticket in self._waiting for ticket in sample.wanted[self])

    def settle(self) -> None:
        """Pass on all that need not wait."""
        group, alone = self.group, len(self.group.members) == 1
        end = self._admitted + (_ALONE if alone and group.unused >= _UNUSED else 0)
        while self._ahead and (self._ahead[0] < end or group.why_not):
            ticket = heapq.heappop(self._ahead)
            if ticket in self._ready:
                self._waiting[ticket] = self._wants[ticket]
        for ticket, sample in [*self._waiting.items()]:
            if group.why_not:
                self._pass(ticket)
            elif sample.by is not None and sample.block != NOWHERE:
                self._copy(ticket, sample, sample.by)
            elif sample.owner is None and self._has_room:
                self._grant(ticket, sample)

    @property
    def _has_room(self) -> bool:
        return len(self.granted) < UNFINISHED * self._workers

    def _copy(self, ticket: int, sample: SharedSample, by: Sharer) -> None:
        self.group.unused = 0
        place = sample.block, sample.nbytes, sample.stamp, PREPARED, sample.number
        doubted = by if self.believed else self
        if self.believed and by.believed:
            self.copied += 1
            self._pass(ticket, (*place, None))
        elif (self.believed or by.believed) and doubted.equal + doubted.compared < COMPARED:
            self.again += 1
            self._comparing[ticket] = doubted
            doubted.compared += 1
            self._pass(ticket, (*place, 1))
        elif self._has_room and not self._comparing:  # else this loader's own workers soon tell more
            self._grant(ticket, sample)

    def _grant(self, ticket: int, sample: SharedSample) -> None:
        group, is_there, wanted = self.group, sample.block != NOWHERE, len(sample.wanted) > 1
        others = not self.believed and sample.wanted
        if others and any(one.believed and not one.is_late and one.waits_for(sample) for one in others):
            return  # it is about to be there, to be compared
        self.again += sample.begun
        if not (is_there or wanted) and (sample.begun or group.unused >= _UNUSED):
            self._pass(ticket)  # others have had it, or are elsewhere
            return
        sample.begun = True
        self.granted.add(sample)
        if is_there:  # and it is not known whether it is the same
            self._pass(ticket)
            return
        group.unused += not wanted
        sample.owner, sample.since = self, self._shared.now()
        self.granted_count += 1
        self._pass(ticket, (ASKED, 0, 0, PREPARED, sample.number, None))

    def _pass(self, ticket: int, *more: Place) -> None:
        _, places = self._ready.pop(ticket)
        self._waiting.pop(ticket, None)
        self.there.add(ticket)
        self._pass_on((ticket, (*places, *more)))
