"""A loader's sampler, and the rules by which its keys become batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from minato_gpu.arguments import Arguments
from minato_gpu.lanes.base import NoSample
from minato_gpu.lanes.streams import is_stateful
from minato_gpu.samples import JSON, Key, Value

# samplers that yield the same order again from the same generator state
_REPLAYED = (
    *(SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler),
    *(list, tuple, range),
)
STATEFUL_DISTRIBUTED = "torchdata.stateful_dataloader.sampler.StatefulDistributedSampler"


class Sampling:
    """The sampler that yields a loader's keys, and the rules by which keys are cut into batches.

    torch's exact ``BatchSampler`` only cuts, so what counts is the sampler inside it.
    """

    def __init__(self, loader: Arguments) -> None:
        batches = loader.batch_sampler
        # keys in a batch, where this package cuts them; None: the sampler yields batches, or (batch_size=None) keys
        # that are not batched
        self.size: int | None = None
        self.drop_last = False
        self.inner: Value = loader.sampler if batches is None else batches  # what yields the keys
        self.batched = batches is not None  # what ``cut`` yields are lists of keys; else single keys
        # with drop_last the number of batches is a multiple of this: the number of devices that batches go to
        self.multiple = _devices(loader.device) if loader.drop_last else 1
        self.iterable = isinstance(loader.dataset, IterableDataset)  # nothing is sampled: workers iterate the data set
        self.stream: Value = loader.dataset if self.iterable else None
        # kept in place of the loader: a reference to that would keep its workers alive after the user has dropped it
        self._loader_generator = loader.generator
        if type(batches) is BatchSampler:
            self.inner, self.size, self.drop_last = batches.sampler, batches.batch_size, batches.drop_last

    @property
    def expected(self) -> int | None:
        """The number of samples of an epoch; None for an iterable data set, a batch sampler of the user's own, and a
        sampler without a length."""
        if self.iterable or (self.batched and self.size is None):
            return None
        if (count := length_of(self.inner)) is None:
            return None
        least = (self.size or 1) * self.multiple
        return count // least * least if self.drop_last else count

    @property
    def replays(self) -> bool:
        """True if the order is known to come out the same when it is drawn again from the same generator state.

        False for a RandomSampler with replacement (or more than a pass) that was given a generator: it draws from that
        piece by piece during the epoch, and others may draw from it in between.
        """
        gradual = type(self.inner) is RandomSampler and not _is_one_pass(self.inner) and self.generator is not None
        return not is_stateful(self.inner) and type(self.inner) in _REPLAYED and not gradual

    @property
    def is_torch_permutation(self) -> bool:
        """True if the sampler is torch's SequentialSampler, or its RandomSampler without replacement and of no more
        than one pass: no key comes twice."""
        return type(self.inner) is SequentialSampler or (type(self.inner) is RandomSampler and _is_one_pass(self.inner))

    @property
    def nested(self) -> Value:
        """The stateful sampler inside a batch sampler that has no state itself (its iterator may have one); or None."""
        return None if is_stateful(self.inner) else next(filter(is_stateful, self.parts), None)

    @property
    def parts(self) -> list[Value]:
        """The sampler and those that it is known to draw from.

        These are a batch sampler's own sampler, or the one whose batches it shares out (Accelerate's), and that one's.
        """
        shared = attribute_of(self.inner, "batch_sampler")
        inside = (attribute_of(each, "sampler") for each in (self.inner, shared))
        return [each for each in (self.inner, shared, *inside) if each is not None]

    @property
    def generator(self) -> torch.Generator | None:
        """The generator that the order is drawn from: the sampler's attribute, or that of one of ``parts``; None if no
        part has one."""
        for sampler in self.parts:
            if isinstance(generator := attribute_of(sampler, "generator"), torch.Generator):
                return generator
        return None

    @property
    def uses_default_generator(self) -> bool:
        """True if the sampler has a ``generator`` that is None: torch's then draw from the global one."""
        return getattr(self.inner, "generator", self) is None

    @property
    def generators(self) -> dict[str, torch.Generator]:
        """The generators that the loader's epochs are drawn from, by role.

        "loader": the loader's own. "sampler": the sampler's, if that is another. "default": torch's global one, if the
        sampler ``replays`` and draws from that.
        """
        found = {} if self._loader_generator is None else {"loader": self._loader_generator}
        if self.generator is not None and self.generator is not self._loader_generator:
            found["sampler"] = self.generator
        if self.replays and self.uses_default_generator:
            found["default"] = torch.default_generator
        return found

    def set_generators(self, states: Mapping[str, torch.Tensor]) -> None:
        """Sets the loader's ``generators`` to these states, by role; not the global one, which is the user's."""
        for role, generator in self.generators.items():
            if role != "default" and role in states:
                generator.set_state(states[role])

    @property
    def sampler_epoch(self) -> int | None:
        """The epoch that ``set_epoch`` was last given, if the sampler has it as ``epoch``; else None."""
        epoch = attribute_of(self.inner, "epoch")
        return epoch if callable(attribute_of(self.inner, "set_epoch")) and isinstance(epoch, int) else None

    def keys_of(self, item: Value) -> list[Key]:
        """Returns the keys of an item that the sampler yielded; NoSample, which takes one ticket, for a batch
        without any."""
        return (list(item) or [NoSample()]) if self.batched else [item]

    def cut(self, keys: Iterable[Value]) -> Iterator[Value]:
        """Yields batches of keys as torch's BatchSampler cuts them, or what the user's own sampler yields."""
        return iter(keys) if self.size is None else _cut(iter(keys), self.size, self.drop_last)

    def describe(self) -> dict[str, JSON]:
        """Returns what a saved state and the loader that loads it must agree on.

        "length" is the sampler's; of a DistributedSampler its data set's, as its own is one rank's share.
        """
        sized = self.inner.dataset if type(self.inner) is DistributedSampler else self.inner
        return {
            "sampler": type(self.inner).__name__,
            "length": length_of(sized),
            **self.cutting,
        }

    @property
    def cutting(self) -> dict[str, JSON]:
        """Returns how keys, or the samples of an iterable data set, become batches."""
        return {"batch_size": self.size, "drop_last": self.drop_last}


def name_of(sampler: Value) -> str:
    """Returns the name of a sampler's class, which need not be imported to be known."""
    return f"{type(sampler).__module__}.{type(sampler).__qualname__}"


def _is_one_pass(sampler: Value) -> bool:
    """Returns whether a random sampler draws a permutation, or the beginning of one."""
    return bool(not sampler.replacement and sampler.num_samples <= len(sampler.data_source))


def attribute_of(sampler: Value, name: str) -> Value:
    """Returns an attribute of a sampler, or None.

    It is a hint, which a property may fail to give (the rank in a process group that does not exist).
    """
    try:
        return getattr(sampler, name, None)
    except Exception:
        return None


def length_of(sized: Value) -> int | None:
    """Returns the length of a data set or sampler, or None; it is a hint, so whatever it raises is no error."""
    try:
        return len(sized)
    except Exception:
        return None


def _devices(device: str | torch.device | Sequence[str | torch.device] | None) -> int:
    """Returns how many devices the loader's argument ``device`` names; None counts as one, the host."""
    return len(device) if isinstance(device, Sequence) and not isinstance(device, str) else 1


def _cut(keys: Iterator[Key], size: int, drop_last: bool) -> Iterator[list[Key]]:
    while batch := list(islice(keys, size)):
        if len(batch) == size or not drop_last:
            yield batch
        if len(batch) < size:  # the keys have ended: an iterator that is asked again may begin anew
            return
