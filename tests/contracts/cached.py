"""A data set whose samples' bytes lie in files, and loaders that keep copies of them."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minato_gpu import DataLoader, Source, read_bytes
from tests.contracts.datasets import rows as rows

SAMPLES = 60
PAGE = 4096
DISK = 8 << 20


def write_files(folder: Path, samples: int = SAMPLES, seed: int = 0) -> Path:
    """One file for each sample, each of which takes a page of shared memory."""
    folder.mkdir(exist_ok=True)
    for key in range(samples):
        size = 2000 + 10 * (key % 50)  # alike, for policies
        np.random.default_rng((seed, key)).integers(0, 256, size, np.uint8).tofile(folder / f"{key}.bin")
    return folder


class Files:
    """Each sample is its key, what its file holds (a checksum), and a drawn number."""

    def __init__(self, folder: Path, samples: int = SAMPLES) -> None:
        self.folder, self.samples = folder, samples

    def __len__(self) -> int:
        return self.samples

    def source(self, key: Any) -> Any:
        return Source(str(self.folder / f"{key}.bin"))

    def __getitem__(self, key: Any) -> tuple[int, int, float]:
        declared = self.source(key)
        sources = (declared,) if isinstance(declared, Source) else declared
        return int(key), sum(zlib.crc32(read_bytes(each).data) for each in sources), float(torch.rand(()))


def loader_of(dataset: Any, cache: Any = None, cache_dir: Any = None, **more: Any) -> DataLoader[Any]:
    """A loader of batches of 8, shuffled with a seed."""
    if "sampler" not in more:
        more = {"shuffle": True, "generator": torch.Generator().manual_seed(3), **more}
    return DataLoader(dataset, 8, **{"num_workers": 1, "cache": cache, "cache_dir": cache_dir, **more})


def without_draws(found: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Samples without what was drawn for them."""
    return [row[:2] for row in found]


def sums(folder: Path, samples: int = SAMPLES) -> list[tuple[int, int]]:
    """Keys and checksums of all files, as they are now."""
    return [(key, zlib.crc32((folder / f"{key}.bin").read_bytes())) for key in range(samples)]


def read(loader: DataLoader[Any]) -> int:
    """Sources that were read from where they lie, in the last epoch or since workers began."""
    stats = loader.stats()["reads"]
    assert stats["by_workers"] == 0, "no worker has waited for storage"
    assert stats["failed"] == 0
    return int(stats["reads"])


def of_tier(loader: DataLoader[Any], tier: str = "memory") -> dict[str, Any]:
    """What is told of a tier."""
    found: dict[str, Any] = loader.stats()["cache"][tier]
    return found


def close(loader: DataLoader[Any]) -> None:
    """End workers that persist."""
    if loader._session.engine is not None:
        loader._session.engine.close()
