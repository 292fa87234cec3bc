"""How the script's loader is found without editing the script: ``iter(loader)`` leads here.

Of several loaders the one for training is analysed: the first that is asked for its third batch while gradients are
enabled (validation runs without); those of the same shape that a script makes for later epochs stand for it. Until
then, and all others, loaders deliver what they always do. A class that has an ``__iter__`` of its own, and does not
call PyTorch's, is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from minato_gpu.lab.analysis.conductor import Conductor
from minato_gpu.lab.analysis.subject import Subject
from minato_gpu.samples import Value
from minato_gpu.sampling.samplers import length_of

_TRIED = 2  # batches


class Loaders:
    """All loaders that the script iterates, in the order in which it begins to.

    ``begin`` makes the conductor for the one that is chosen; ``number``: which one, from 1 on, where the user says so.
    """

    def __init__(self, begin: Callable[[Any], Conductor], number: int | None = None) -> None:
        self._begin, self._number = begin, number
        self._originals: dict[type, Callable[[Any], Iterator[Value]]] = {}
        self._known: list[tuple[weakref.ref[Any], list[int]]] = []
        self._starting = False
        self.conductor: Conductor | None = None

    def install(self) -> None:
        """From now on in this process, and not in those that it forks."""
        from torch.utils.data import DataLoader

        from minato_gpu import loader as ours

        for kind in (DataLoader, ours.DataLoader):
            self._originals[kind] = kind.__iter__
            self._replace(kind)

    def uninstall(self) -> None:
        """As it was before."""
        for kind, original in self._originals.items():
            kind.__iter__ = original  # type: ignore[attr-defined]

    def _replace(self, kind: type) -> None:
        original = self._originals[kind]

        def iterated(loader: Any) -> Iterator[Value]:
            return self._iterated(loader, original)

        kind.__iter__ = iterated  # type: ignore[attr-defined]

    def _iterated(self, loader: Any, original: Callable[[Any], Iterator[Value]]) -> Iterator[Value]:
        conductor = self.conductor
        if conductor is not None and _stands_for(loader, conductor.subject):
            return ScriptEpoch(self, loader, iter(()), [0], conductor)
        if conductor is not None or self._starting:
            return original(loader)
        return ScriptEpoch(self, loader, original(loader), self._count_of(loader))

    def _count_of(self, loader: Any) -> list[int]:
        """How many batches this loader has given: a list of one number, which is counted on."""
        for known, count in self._known:
            if known() is loader:
                return count
        self._known.append((weakref.ref(loader), count := [0]))
        return count

    def is_for_training(self, loader: Any, given: int) -> bool:
        """Whether this is the loader to analyse, before the next batch is given."""
        import torch

        if self.conductor is not None:
            return False
        if self._number is not None:
            return next((known() is loader for known, _ in self._known[self._number - 1 : self._number]), False)
        return given >= _TRIED and torch.is_grad_enabled()

    def choose(self, loader: Any) -> Conductor:
        """Analyse this one."""
        self._starting = True
        try:
            self.conductor = self._begin(loader)
        finally:
            self._starting = False
        return self.conductor

    def described(self) -> list[str]:
        """Each loader in a few words."""
        found = []
        for number, (known, (count,)) in enumerate(self._known, 1):
            loader, what = known(), "gone"
            if loader is not None:
                length = "an unknown number of" if (told := length_of(loader)) is None else told
                what = f"{type(loader).__module__}.{type(loader).__qualname__}, {length} batches an epoch"
            chosen = self.conductor is not None and loader is self.conductor.subject.loader
            asked = "analysed" if chosen else f"asked for {count} batches"
            found.append(f"loader {number} ({what}): {asked}")
        return found


def _stands_for(loader: Any, subject: Subject) -> bool:
    """Whether this is the loader that is analysed, or the one that the script has made for its next epoch."""
    import torch

    return loader is subject.loader or (torch.is_grad_enabled() and subject.is_followed_by(loader))


class ScriptEpoch:
    """An epoch as the script iterates it, as long as it always was: of the loader as it is, and from the batch on that
    shows it to be the one for training, of the analysis (``conductor``)."""

    def __init__(
        self,
        loaders: Loaders,
        loader: Any,
        batches: Iterator[Value],
        count: list[int],
        conductor: Conductor | None = None,
    ) -> None:
        self._loaders, self._loader, self._batches, self._count = loaders, loader, batches, count
        self._conductor = conductor
        self._length = length_of(loader)
        self._given = 0

    def __iter__(self) -> ScriptEpoch:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __next__(self) -> Value:
        has_more = self._length is None or self._given < self._length  # the end of an epoch stays what it is
        if self._conductor is None and has_more and self._loaders.is_for_training(self._loader, self._count[0]):
            self._take_over()
        if self._conductor is None:
            batch = next(self._batches)
            self._count[0] += 1
        else:
            self._conductor.asked()
            if not has_more:
                self._conductor.look_ahead()  # ends the script, where nothing is left to measure
                raise StopIteration
            batch = self._conductor.next()
        self._given += 1
        return batch

    def _take_over(self) -> None:
        self._batches = iter(())  # its workers end
        if getattr(self._loader, "persistent_workers", False) and hasattr(self._loader, "_iterator"):
            self._loader._iterator = None
        self._conductor = self._loaders.choose(self._loader)
