"""PyTorch's DataLoader: in order, out of order (whole batches overtake), and with deeper prefetch.

Its best: the default collate stacks straight into shared memory, which a NumPy collate of our own did not beat;
persistent workers where several epochs follow. PyTorch 2.13 has no threads for workers; ``torchdata.nodes`` has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.multiprocessing import set_sharing_strategy
from torch.utils.data import DataLoader

from benchmarks.peers.base import Job, Loader


@dataclass(frozen=True)
class PyTorch(Loader):
    """``torch.utils.data.DataLoader`` with worker processes."""

    package = "torch"

    in_order: bool = True
    prefetch_factor: int = 2
    sharing: str = ""  # how tensors are shared, if not as is usual

    def settings(self, job: Job) -> dict[str, Any]:
        return {
            "num_workers": job.workers,
            "prefetch_factor": self.prefetch_factor,
            "in_order": self.in_order,
            "persistent_workers": job.keep_workers,
            "multiprocessing_context": "fork",
        }

    def make(self, job: Job) -> Iterable[Any]:
        chosen = self.settings(job) | job.shuffling
        if self.sharing:
            set_sharing_strategy(self.sharing)
        return DataLoader(job.dataset, batch_size=job.batch_size, collate_fn=job.collate, **chosen)
