"""The loader that is analysed: what it is, and others like it, over the same data set with a clock before it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from inspect import signature
from itertools import islice
from typing import Any
from weakref import WeakSet

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate, default_convert
from torch.utils.data import Sampler as TorchSampler

from minato_gpu import loader as ours
from minato_gpu.lab.analysis.profile import LoaderKind
from minato_gpu.lab.analysis.stopwatch import NoteBook, Stopwatch, watched, watched_pipeline
from minato_gpu.options.options import Options
from minato_gpu.samples import Key, Value
from minato_gpu.sampling.samplers import length_of

_MOST_DRAWN = 20_000  # batches
_OF_TORCH = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "pin_memory_device", "in_order"),
)
_KINDS: dict[LoaderKind, Any] = {"torch": DataLoader, "minato_gpu": ours.DataLoader}
_NOT_COPIED = {
    *("self", "dataset", "shuffle", "batch_size", "sampler", "batch_sampler", "drop_last", "generator"),
    *("persistent_workers", "epochs", "cache", "cache_dir", "trace", "metrics_port"),
}


class Subject:
    """The loader that is analysed."""

    def __init__(self, loader: DataLoader[Value], folder: str) -> None:
        """Draws an epoch from the sampler, at most 20,000 batches. ``folder``: where workers write their notes."""
        self.loader, self.folder = loader, folder
        self._own = WeakSet[Any]()  # those that were made like it
        self.kind: LoaderKind = "minato_gpu" if isinstance(loader, ours.DataLoader) else "torch"
        self.options = Options.check(loader) if isinstance(loader, ours.DataLoader) else None  # of one of ours
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        self.workers = loader.num_workers
        self.length = length_of(loader)
        self._batched = loader.batch_sampler is not None
        drawn = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        found = [] if self.is_stream else list(islice(iter(drawn), _MOST_DRAWN))
        # of the batches of an epoch, in the sampler's order, as the analysis uses them; empty for a stream
        self.keys: list[list[Key]] = [list(each) for each in found] if self._batched else [[each] for each in found]
        self.batch_size = loader.batch_size or max((len(each) for each in self.keys), default=1)

    def is_followed_by(self, loader: DataLoader[Value]) -> bool:
        """Returns whether ``loader`` stands for the analysed one in a later epoch, as scripts may make one for each.

        It does with the same class, class of data set, batch size, workers and length, unless the analysis made it.
        """
        if loader in self._own:
            return False
        shapes = [
            (type(each), type(each.dataset), each.batch_size, each.num_workers, length_of(each))
            for each in (loader, self.loader)
        ]
        return shapes[0] == shapes[1]

    @property
    def samples(self) -> int:
        """Number of samples of an epoch; 0 where nobody knows."""
        if self.length is None:
            return 0
        if len(self.keys) == self.length:
            return sum(map(len, self.keys))
        return self.length * self.batch_size

    def book(self, phase: str) -> NoteBook:
        """Returns where workers note what they see in this phase."""
        return NoteBook(self.folder, phase)

    def like(
        self,
        phase: str | None = None,
        *,
        looks: bool = False,
        workers: int | None = None,
        kind: LoaderKind | None = None,
        batches: Sequence[list[Key]] | None = None,
    ) -> DataLoader[Value]:
        """Returns a loader like it, without caches, trace, metrics and workers that stay.

        ``phase``: workers note under this name what each sample costs and, with ``looks``, which files it is in; None:
        they note nothing. ``workers``: another number of them. ``kind``: the other loader. ``batches``: the keys; None:
        those of the whole epoch. Raises ValueError for torch's loader with a pipeline.
        """
        kind = kind or self.kind
        if kind == "torch" and kind != self.kind and getattr(self.loader, "pipeline", None) is not None:
            raise ValueError("torch's loader runs no pipeline")
        watch = None if phase is None else Stopwatch(self.book(phase), looks=looks)
        given = self._arguments(watch, kind)
        if workers is not None:
            given["num_workers"] = workers
            if "max_workers" in given:
                given["max_workers"] = None
        dataset = self.loader.dataset if watch is None else watched(self.loader.dataset, watch)
        # more workers than cores may be what is to be tried; for good, as restoring is not safe beside other threads
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        made: DataLoader[Value] = _KINDS[kind](dataset, **self._cut(batches), **given)
        self._own.add(made)
        return made

    def _arguments(self, watch: Stopwatch | None, kind: LoaderKind) -> dict[str, Any]:
        """Returns the arguments of this kind of loader, but for the data set and its order; for the other kind those
        that torch's has."""
        if kind == "torch" or kind != self.kind:
            given = {name: getattr(self.loader, name) for name in _OF_TORCH}
        else:
            names = signature(ours.DataLoader.__init__).parameters
            given = {name: getattr(self.loader, name) for name in names if name not in _NOT_COPIED}
            if not self.loader.prefetch_given:  # type: ignore[attr-defined]
                del given["prefetch_factor"]
            if watch is not None and given["pipeline"] is not None:
                given["pipeline"] = watched_pipeline(given["pipeline"], watch)
        # ours writes samples into rows where it knows that they are only stacked: another function would hide that
        known = self.kind == "minato_gpu" and given["collate_fn"] in (default_collate, default_convert)
        if watch is not None and not known:
            given["collate_fn"] = watch.collating(given["collate_fn"])
        return given

    def _cut(self, batches: Sequence[list[Key]] | None) -> dict[str, Any]:
        size = self.loader.batch_size
        if self.is_stream:
            return {"batch_size": size, "drop_last": self.loader.drop_last}
        batches = self.keys if batches is None else batches
        flat = Given([key for each in batches for key in each])
        if not self._batched:
            return {"batch_size": None, "sampler": flat}
        if type(self.loader.batch_sampler) is BatchSampler:
            return {"batch_size": size, "sampler": flat, "drop_last": self.loader.drop_last}
        return {"batch_sampler": Given(list(batches))}


class Given(TorchSampler[Any]):
    """Keys, or batches of keys, as they are given."""

    def __init__(self, keys: Sequence[Any]) -> None:
        self._keys = keys

    def __iter__(self) -> Any:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
