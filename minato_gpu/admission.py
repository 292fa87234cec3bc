"""From the sampler to tickets: keys, how often each has come in the epoch, and the order in which to deliver.

Epoch after epoch a *source* yields the sampler's batches. The next epoch's source can be made ahead of need
(``Speculation``) where its order can be drawn without side effects: the generators are put back as they were, and
when the epoch really begins, it is used only if they still are.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from minato_gpu.lanes.base import NoSample
from minato_gpu.lanes.streams import StreamStart
from minato_gpu.occurrences import Occurrences as Occurrences
from minato_gpu.resume.delivered import Delivered
from minato_gpu.resume.orders import REPLAY, Coming, Order, Taken
from minato_gpu.resume.state import packed_state
from minato_gpu.resume.streams import Streams
from minato_gpu.samples import witness_of
from minato_gpu.scheduling.messages import Span

T = TypeVar("T")


class Drawn(NamedTuple):
    """One batch of the sampler: ``positions`` in the epoch's order, keys and occurrences (None: all 0).

    ``left``: where an earlier run delivered some of it, the offsets of what it left, as half-open ranges.
    """

    positions: range | list[int]
    keys: list[Any]
    occurrences: list[int] | None
    left: tuple[Span, ...] | None = None


OFTEN = 16
"""Saves come often where no more batches than these are drawn between two of them."""

_PLAIN = {int, str, bool, float, np.int64, np.int32, NoSample}


class Mark(NamedTuple):
    """Where one batch begins in the sampler's order; ``state``: the sampler's own before it was drawn, where kept."""

    place: int
    position: int
    state: Taken | None
    keys: list[Any]

    @property
    def end(self) -> int:
        """The position after its last."""
        return self.position + len(self.keys)


class Source:
    """The batches of one epoch. ``batched``: the sampler yields lists of keys, else single keys.

    ``place`` and ``position``: number and first position of the batch to draw next. ``delivered``: what the consumer
    has; an epoch that goes on where an earlier run left it begins with that run's. ``marks``: for a sampler that
    cannot be replayed, the batches that may still have to be delivered. ``multiple``: batches come in a multiple of so
    many; those that are left over in the end are dropped, unless an earlier run has delivered some of them.
    """

    def __init__(
        self,
        number: int,
        seed: int,
        order: Iterator[Any],
        *,
        batched: bool,
        occurrences: Occurrences,
        place: int = 0,
        position: int = 0,
        delivered: Delivered | None = None,
        multiple: int = 1,
    ) -> None:
        self.number = number
        self.seed = seed
        self.order = order if isinstance(order, Order) else Order(order)
        self.occurrences = occurrences
        self.place = place
        self.position = position
        self.delivered = Delivered() if delivered is None else delivered
        self.marks: deque[Mark] = deque()
        self.ended = False  # the sampler has said so
        self.witness: int | None = None  # of the epoch's first keys
        self.streams: Streams | None = None  # of an iterable data set: its workers' own, and where each starts
        self.starts: list[StreamStart] = []
        self._saved = place  # when a state was last asked for, or might have been: what came next then
        self._stores_keys = True  # as far as is known, keys that are drawn ahead can be part of a state
        self._before = Delivered(self.delivered.batches, self.delivered.low, self.delivered.above)
        self._batched = batched
        self._multiple = multiple
        self._behind: tuple[int, Occurrences] | None = None  # at an earlier place; kept while saves come often
        self._ahead: deque[Coming] = deque()  # drawn to see whether the round is whole

    def draw(self) -> Drawn | None:
        """The next batch, or None at the end. What the sampler raises passes through."""
        if not self._ahead or (len(self._ahead) + self.place) % self._multiple:
            self._look_ahead()
        if not self._ahead:
            self._check_end()
            return None
        state, item = self._ahead.popleft()
        keys = self.keys_of(item)
        first, self.position = self.position, self.position + len(keys)
        if self.place == 0:
            self.witness = witness_of(keys)
        if self.order.way != REPLAY:
            self._remember(Mark(self.place, first, state, keys))
        self.place += 1
        left = None
        if self._before.above and first < self._before.above[-1][1]:
            left = tuple((lo - first, hi - first) for lo, hi in self._before.left_of(first, self.position))
        return Drawn(range(first, self.position), keys, self.occurrences.count(keys), left)

    def _look_ahead(self) -> None:
        """Draw the rest of the round; nothing of it if it is not whole."""
        while not self.ended or self.order.coming:  # a state may hold what comes before its end
            often = self.place + len(self._ahead) - self._saved < OFTEN
            try:
                self._ahead.append(self.order.draw(keep=often or not self._stores_keys))
            except StopIteration:
                self.ended = True
                break
            if self.order.way != REPLAY:
                keys = self.keys_of(self._ahead[-1][1])
                self._stores_keys = self._stores_keys and _PLAIN.issuperset(map(type, keys))
            if (len(self._ahead) + self.place) % self._multiple == 0:
                return
        kept, end = 0, self.position
        while kept < len(self._ahead) and (end < self._before.top or self._multiple == 1):
            end += len(self.keys_of(self._ahead[kept][1]))
            kept += 1
        while len(self._ahead) > kept:
            self._ahead.pop()

    @property
    def coming(self) -> list[Coming]:
        """What has been drawn from the sampler and is no ticket yet: it comes next."""
        return [*self._ahead, *self.order.coming]

    def rest(self) -> list[Any]:
        """What the sampler still yields after the batches drawn: see ``Order.rest``."""
        return [item for _, item in self._ahead] + self.order.rest()

    def saved(self, marks: list[Mark]) -> Occurrences:
        """A state is made that begins with these marks, the last ones, or else now; there may be more of them soon.

        Returns how often each key had come by then. Those who save seldom pay for the whole window.
        """
        self._saved = self.place
        if self._stores_keys:  # nobody is likely to go further back than this; who does gets keys
            for at in range(len(self.marks) - len(marks) - 1, -1, -1):
                if self.marks[at].state is None:
                    break
                self.marks[at] = self.marks[at]._replace(state=None)
        place = marks[0].place if marks else self.place
        if self._behind is None or self._behind[0] > place:
            behind = self.occurrences.before([key for mark in marks for key in mark.keys])
        else:
            behind = self._behind[1]
            for mark in islice(self.marks, self._behind[0] - self.marks[0].place if self.marks else 0, None):
                if mark.place == place:
                    break
                behind.count(mark.keys)
        self._behind = place, behind
        return behind

    def keys_of(self, item: Any) -> list[Any]:
        """The keys of what the sampler yielded: one ticket each, and one for a batch without any."""
        return (list(item) or [NoSample()]) if self._batched else [item]

    def _check_end(self) -> None:
        """What an earlier run delivered must be there: an epoch that ends before it would never come to its end."""
        before = self._before
        if before.batches > self.place or before.top > self.position:
            raise ValueError(
                f"the state has {before.batches} batches delivered up to position {before.top}, but the sampler ends "
                f"after {self.place} at {self.position}; it is damaged, or belongs to another data set or sampler"
            )

    def skip(self) -> None:
        """Draw again, and drop, the batches of which nothing is left. Raises ValueError if the order is too short.

        A state with the sampler's own or with the keys begins at the first batch that is not delivered whole.
        """
        while self.position < self.delivered.low:
            try:
                before, item = self.order.draw()
            except StopIteration:
                raise ValueError(
                    f"the state has {self.delivered.low} samples delivered, but the sampler yields {self.position}; it "
                    "belongs to another data set or sampler"
                ) from None
            keys = self.keys_of(item)
            if self.place == 0:
                self.witness = witness_of(keys)
            if self.position + len(keys) > self.delivered.low:
                self.order.put_back(item, before)
                return
            if self.order.way != REPLAY:
                raise ValueError(f"state: {self.delivered.low} samples delivered, and its order begins long before")
            self.occurrences.count(keys)
            self.place, self.position = self.place + 1, self.position + len(keys)

    def _remember(self, mark: Mark) -> None:
        marks = self.marks
        marks.append(mark)
        while len(marks) > 1 and marks[1].position <= self.delivered.floor:
            marks.popleft()
        if self._behind is not None and self._behind[0] < marks[0].place:
            self._behind = None


def never_repeats(loader: DataLoader[Any]) -> bool:
    """Whether the sampler is one of torch's own that yields every index at most once."""
    sampler = loader.sampler
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return False
    if loader.batch_sampler is not None:
        sampler = loader.batch_sampler.sampler
    if type(sampler) is SequentialSampler:
        return True
    return type(sampler) is RandomSampler and not sampler.replacement and _one_permutation(sampler)


def yields_once(loader: DataLoader[Any]) -> bool:
    """Whether no index comes twice in an epoch: torch's samplers as above, and torchdata's."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(sampler) is BatchSampler or _name_of(sampler) == f"{_TORCHDATA}.BatchSampler":
        sampler = sampler.sampler
    if _name_of(sampler) == f"{_TORCHDATA}.RandomSampler":
        return not sampler.replacement and _one_permutation(sampler)
    return _name_of(sampler) == f"{_TORCHDATA}.StatefulDistributedSampler" or never_repeats(loader)


_TORCHDATA = "torchdata.stateful_dataloader.sampler"


def _name_of(sampler: Any) -> str:
    return f"{type(sampler).__module__}.{type(sampler).__qualname__}"


def _one_permutation(sampler: Any) -> bool:
    return bool(sampler.num_samples <= len(sampler.data_source))


class Speculation:
    """The next epoch's order and seed, drawn ahead. An iterator over the sampler's batches.

    As long as the epoch has not begun, every draw happens on states of its own: the generators are put back to what
    they were. ``adopt`` then leaves them as drawing the same now would have left them.
    """

    def __init__(self, loader: DataLoader[Any], *, draws_seed: bool) -> None:
        self._generators = _generators(loader)
        self._before = self._states = [g.get_state() for g in self._generators]
        self._ahead = True
        self.seed = 0
        if draws_seed:
            seed = torch.empty((), dtype=torch.int64)
            self.seed = int(self._apart(lambda: seed.random_(generator=loader.generator)).item())
        self._begun_from = self._states
        self._order = self._apart(lambda: iter(loader._index_sampler))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._apart(lambda: next(self._order)) if self._ahead else next(self._order)

    def _apart(self, act: Callable[[], T]) -> T:
        outside = [g.get_state() for g in self._generators]
        self._set(self._states)
        try:
            return act()
        finally:
            self._states = [g.get_state() for g in self._generators]
            self._set(outside)

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def begun_from(self, generators: Mapping[str, torch.Generator]) -> dict[str, str]:
        """The states of these generators just before the order was drawn, packed."""
        pairs = list(zip(self._generators, self._begun_from, strict=True))
        return {role: packed_state(s) for role, own in generators.items() for generator, s in pairs if generator is own}

    def holds(self) -> bool:
        """Whether the epoch would be drawn just like this if it began now."""
        return all(torch.equal(g.get_state(), s) for g, s in zip(self._generators, self._before, strict=True))

    def adopt(self) -> None:
        """The epoch begins: from now on the sampler draws from the generators themselves."""
        self._ahead = False
        self._set(self._states)


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    found: list[torch.Generator] = []
    for generator in (loader.generator, getattr(sampler, "generator", None)):
        generator = torch.default_generator if generator is None else generator
        if all(generator is not other for other in found):
            found.append(generator)
    return found


class OrderLog:
    """The delivered order of an out-of-order run: recorded to a file, or replayed from one that exists.

    A line of JSON for each batch: ``{"epoch": 0, "positions": [[0, 5], [6, 17]]}``, half-open ranges of positions.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replays = path.exists() and path.stat().st_size > 0
        self._batches: dict[int, list[list[Span]]] = {}
        if self.replays:
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                try:
                    entry = json.loads(line)
                    spans = [(int(lo), int(hi)) for lo, hi in entry["positions"]]
                    self._batches.setdefault(int(entry["epoch"]), []).append(spans)
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"order_log: line {number} of {path} is not a recorded batch: {error}") from error
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def record(self, epoch: int, spans: list[Span]) -> None:
        """Append one delivered batch."""
        with self.path.open("a") as file:
            file.write(json.dumps({"epoch": epoch, "positions": spans}) + "\n")

    def replay(self, source: Source) -> Iterator[Drawn]:
        """The source's tickets in the recorded order and batches. Raises ValueError where they do not match."""
        batches = self._batches.get(source.number)
        if batches is None:
            raise ValueError(f"order_log: {self.path} has no epoch {source.number}; it ends before")
        waiting: dict[int, tuple[Any, int]] = {}
        for spans in batches:
            positions = [position for lo, hi in spans for position in range(lo, hi)]
            while any(position not in waiting for position in positions):
                drawn = source.draw()
                if drawn is None:
                    raise ValueError(f"order_log: {self.path} names positions that epoch {source.number} lacks")
                occurrences = drawn.occurrences or [0] * len(drawn.keys)
                waiting.update(zip(drawn.positions, zip(drawn.keys, occurrences, strict=True), strict=True))
            pairs = [waiting.pop(position) for position in positions]
            yield Drawn(positions, [key for key, _ in pairs], [occurrence for _, occurrence in pairs])
        if waiting or source.draw() is not None:
            raise ValueError(f"order_log: {self.path} ends before epoch {source.number} does")
