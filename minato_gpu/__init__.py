"""minato_gpu: a PyTorch data loader in which slow samples hold up nobody, on CPU workers and GPUs together.

The names are imported when they are first used, so that ``minato_gpu.scheduling`` needs nothing but NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minato_gpu.checkpoint.ranks import merge_state_dicts
    from minato_gpu.faults.failures import BadSample, TooManyFailures
    from minato_gpu.faults.watchdog import WorkerHung
    from minato_gpu.lanes.far.cluster import Lanes
    from minato_gpu.lanes.far.ray_lanes import RayLanes
    from minato_gpu.loader import DataLoader
    from minato_gpu.memory.worker_blocks import shared_empty
    from minato_gpu.pipeline.pipeline import Field, Pipeline, Stage
    from minato_gpu.pipelines.torchvision_datasets import from_torchvision
    from minato_gpu.sampling.sharded_dataset import ShardedDataset, Shards, SplitsStates
    from minato_gpu.sources.reading import read_bytes
    from minato_gpu.sources.source import Source

__version__ = "0.1.0"
__all__ = [
    "BadSample",
    "DataLoader",
    "Field",
    "Lanes",
    "Pipeline",
    "RayLanes",
    "ShardedDataset",
    "Shards",
    "Source",
    "SplitsStates",
    "Stage",
    "TooManyFailures",
    "WorkerHung",
    "from_torchvision",
    "merge_state_dicts",
    "read_bytes",
    "shared_empty",
]

_HOMES = {
    "BadSample": "faults.failures",
    "DataLoader": "loader",
    "Field": "pipeline.pipeline",
    "Lanes": "lanes.far.cluster",
    "Pipeline": "pipeline.pipeline",
    "RayLanes": "lanes.far.ray_lanes",
    "ShardedDataset": "sampling.sharded_dataset",
    "Shards": "sampling.sharded_dataset",
    "Source": "sources.source",
    "SplitsStates": "sampling.sharded_dataset",
    "Stage": "pipeline.pipeline",
    "TooManyFailures": "faults.failures",
    "WorkerHung": "faults.watchdog",
    "from_torchvision": "pipelines.torchvision_datasets",
    "merge_state_dicts": "checkpoint.ranks",
    "read_bytes": "sources.reading",
    "shared_empty": "memory.worker_blocks",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"minato_gpu.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'minato_gpu' has no attribute {name!r}")
