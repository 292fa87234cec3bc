"""From the sampler to tickets: keys, how often each has come in the epoch, and the order in which to deliver.

Epoch after epoch a *source* yields the sampler's batches. The next epoch's source can be made ahead of need
(``Speculation``) where its order can be drawn without side effects: the generators are put back as they were, and
when the epoch really begins, it is used only if they still are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from minato_gpu.lanes.base import NoSample
from minato_gpu.scheduling.messages import Span

T = TypeVar("T")


class Drawn(NamedTuple):
    """One batch of the sampler: ``positions`` in the epoch's order, keys and occurrences (None: all 0)."""

    positions: range | list[int]
    keys: list[Any]
    occurrences: list[int] | None


class Source:
    """The batches of one epoch. ``batched``: the sampler yields lists of keys, else single keys."""

    def __init__(
        self, number: int, seed: int, order: Iterator[Any], *, batched: bool, occurrences: Occurrences
    ) -> None:
        self.number = number
        self.seed = seed
        self._order = order
        self._batched = batched
        self._occurrences = occurrences
        self._position = 0

    def draw(self) -> Drawn | None:
        """The next batch, or None at the end. What the sampler raises passes through."""
        try:
            item = next(self._order)
        except StopIteration:
            return None
        keys = (list(item) or [NoSample()]) if self._batched else [item]
        first, self._position = self._position, self._position + len(keys)
        return Drawn(range(first, self._position), keys, self._occurrences.count(keys))


class Occurrences:
    """How often each key has come before in the epoch; integers below ``length`` take one byte each."""

    def __init__(self, length: int | None, *, unique: bool) -> None:
        self._unique = unique
        self._seen = None if unique or length is None else bytearray(length)
        self._others: Counter[Any] = Counter()

    def count(self, keys: list[Any]) -> list[int] | None:
        """The occurrence of each key, in order; None when all are 0."""
        if self._unique:
            return None
        out = [self._one(key) for key in keys]
        return out if any(out) else None

    def _one(self, key: Any) -> int:
        seen = self._seen
        if seen is not None and type(key) is int and 0 <= key < len(seen) and seen[key] < 255:
            seen[key] += 1
            return seen[key] - 1
        try:
            hash(key)
        except TypeError:
            key = repr(key)
        before = self._others[key]
        self._others[key] += 1
        return before + (255 if seen is not None and type(key) is int and 0 <= key < len(seen) else 0)


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


def _one_permutation(sampler: RandomSampler) -> bool:
    return sampler.num_samples <= len(sampler.data_source)


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
