"""``num_workers=0``: PyTorch's own single-process iterator, with the pipeline's stages and the counters added.

Nothing is seeded here but the pipeline's own draws: the main process's generators behave as PyTorch leaves them.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from minato_gpu.admission import Occurrences, never_repeats
from minato_gpu.samples import sample_seed
from minato_gpu.telemetry import Telemetry, size_of


class _PipelineFetcher:
    """Fetches samples as PyTorch's fetcher does, through the pipeline."""

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader = loader
        self._seed = seed
        self._occurrences = Occurrences(None, unique=never_repeats(loader))

    def fetch(self, keys: Any) -> Any:
        batched = self._loader._auto_collation
        keys = list(keys) if batched else [keys]
        occurrences = self._occurrences.count(keys) or [0] * len(keys)
        run, dataset = self._loader.pipeline.run, self._loader.dataset
        samples = [
            run(dataset[key], sample_seed(self._seed, 0, key, occurrence))
            for key, occurrence in zip(keys, occurrences, strict=True)
        ]
        return self._loader.collate_fn(samples if batched else samples[0])


class InlineIterator(_SingleProcessDataLoaderIter):
    """One epoch in the main process."""

    def __init__(self, loader: Any, expected: int | None) -> None:
        super().__init__(loader)
        self.log = Telemetry(expected, perf_counter())
        self.log.lanes["cpu"].slots = 1
        self._to_device = loader._to_device
        if loader.pipeline is not None:
            self._dataset_fetcher: Any = _PipelineFetcher(loader, self._base_seed)

    def _next_data(self) -> Any:
        begin = perf_counter()
        try:
            data = super()._next_data()
        except StopIteration:
            self.log.end = perf_counter()
            raise
        now = perf_counter()
        size = size_of(data)
        self.log.inline(begin, now, size)
        return self._to_device(data)
