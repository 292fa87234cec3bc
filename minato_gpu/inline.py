"""``num_workers=0``: PyTorch's own single-process iterator, with the pipeline's stages and the counters added.

Nothing is seeded here but the pipeline's own draws: the main process's generators behave as PyTorch leaves them.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter
from torch.utils.data.datapipes.datapipe import MapDataPipe

from minato_gpu.admission import Occurrences, never_repeats
from minato_gpu.samples import Origin, explain, sample_seed
from minato_gpu.telemetry import Telemetry, size_of


class _Fetcher:
    """Fetches samples as PyTorch's fetcher for map-style data sets does, through the pipeline if there is one.

    An error keeps its type and text, as in PyTorch, and gets a note that says where it happened.
    """

    def __init__(self, loader: Any, seed: int, epoch: int) -> None:
        self._loader = loader
        self._seed = seed
        self._epoch = epoch
        self._position = 0
        self.size = 0  # samples of the last batch
        self._occurrences = Occurrences(None, unique=never_repeats(loader) or loader.pipeline is None)
        many = getattr(loader.dataset, "__getitems__", None)
        self._many = many if many and loader._auto_collation and loader.pipeline is None else None

    def fetch(self, keys: Any) -> Any:
        """One batch."""
        batched = self._loader._auto_collation
        keys = list(keys) if batched else [keys]
        self.size = len(keys)
        first, self._position = self._position, self._position + len(keys)
        occurrences = self._occurrences.count(keys) or [0] * len(keys)
        if self._many:
            samples = self._many(keys)
        else:
            samples = [self._one(first + at, key, occurrences[at]) for at, key in enumerate(keys)]
        try:
            return self._loader.collate_fn(samples if batched else samples[0])
        except Exception as error:
            error.add_note(f"collate, epoch {self._epoch}, positions {first} to {self._position - 1}, indices {keys}")
            raise

    def _one(self, position: int, key: Any, occurrence: int) -> Any:
        try:
            value = self._loader.dataset[key]
            if self._loader.pipeline is None:
                return value
            return self._loader.pipeline.run(value, sample_seed(self._seed, 0, key, occurrence))
        except Exception as error:
            cause, origin = explain(error, Origin(self._epoch, position, key, lane="cpu"))
            cause.add_note(str(origin))
            raise cause from None


class InlineIterator(_SingleProcessDataLoaderIter):
    """One epoch in the main process."""

    def __init__(self, loader: Any, expected: int | None, epoch: int) -> None:
        super().__init__(loader)
        self.log = Telemetry(expected, perf_counter())
        self.log.lanes["cpu"].slots = 1
        self._to_device = loader._to_device
        self._epoch = epoch
        if self._dataset_kind == _DatasetKind.Map and not isinstance(self._dataset, MapDataPipe):
            self._dataset_fetcher: Any = _Fetcher(loader, int(self._base_seed), epoch)

    def _next_data(self) -> Any:
        begin = perf_counter()
        try:
            data = super()._next_data()  # type: ignore[no-untyped-call]
        except StopIteration:
            self.log.end = perf_counter()
            raise
        now = perf_counter()
        fetcher = self._dataset_fetcher
        size = fetcher.size if isinstance(fetcher, _Fetcher) else size_of(data)
        self.log.inline(self._epoch, begin, now, size)
        return self._to_device(data)

    def memory(self) -> dict[str, Any]:
        """There is no memory in flight, and nothing was predicted."""
        nothing = {"samples": 0, "log_sigma": None, "rank_correlation": None}
        return {"prediction": nothing, "bytes_in_flight": 0, "bytes_in_flight_peak": 0}
