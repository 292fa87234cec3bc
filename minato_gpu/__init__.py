"""minato_gpu: a PyTorch data loader in which slow samples hold up nobody, on CPU workers and GPUs together.

The names are imported when they are first used, so that ``minato_gpu.scheduling`` needs nothing but NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minato_gpu.loader import DataLoader
    from minato_gpu.memory.shared import shared_empty
    from minato_gpu.pipeline import Field, Pipeline, Stage
    from minato_gpu.resume.ranks import merge_state_dicts

__version__ = "0.1.0"
__all__ = ["DataLoader", "Field", "Pipeline", "Stage", "merge_state_dicts", "shared_empty"]


def __getattr__(name: str) -> Any:
    if name == "DataLoader":
        from minato_gpu.loader import DataLoader

        return DataLoader
    if name == "merge_state_dicts":
        from minato_gpu.resume.ranks import merge_state_dicts

        return merge_state_dicts
    if name == "shared_empty":
        from minato_gpu.memory.shared import shared_empty

        return shared_empty
    if name in __all__:
        from minato_gpu import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 'minato_gpu' has no attribute {name!r}")
