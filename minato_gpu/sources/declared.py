"""What a data set declares of its sources, also where torch's own wrappers stand before it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from minato_gpu.notices import say_once

SourceOf = Callable[[Any], Any]
"""From a key to a ``Source``, or several."""


def source_of(dataset: Any) -> SourceOf | None:
    """The ``source`` of a data set; None where it has none. Of a ``Subset`` or a ``ConcatDataset`` it is that of the
    data sets within, if all of these have one. Where it raises, that is said, and nothing is read ahead."""
    try:
        declared = getattr(dataset, "source", None)
    except Exception as error:  # a property's, of a data set that knows nothing of this
        say_once(
            f"The attribute 'source' of the data set ({type(dataset).__name__}) raised {error!r}: nothing is read ahead"
        )
        return None
    if callable(declared):
        return declared  # type: ignore[no-any-return]
    if type(dataset) is Subset:
        within, indices = source_of(dataset.dataset), dataset.indices
        return None if within is None else lambda key: within(indices[key])
    if type(dataset) is ConcatDataset:
        return _of_several(dataset)
    return None


def _of_several(dataset: ConcatDataset[Any]) -> SourceOf | None:
    parts = [source_of(each) for each in dataset.datasets]
    ends = dataset.cumulative_sizes

    def found(key: int) -> Any:
        key = key if key >= 0 else key + ends[-1]
        part = bisect_right(ends, key)
        declared = parts[part]
        assert declared is not None
        return declared(key - (ends[part - 1] if part else 0))

    return None if None in parts else found
