"""The inputs of a DALI graph: fields, and parameters whose names may not be known before there is a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from minato_gpu.lanes.dali_types import Graph, Node
from minato_gpu.stages import Stage


class NamesUnknown(Exception):
    """Which parameters a stage draws is not known before there is a sample."""


class AskedFor(Mapping[str, Node]):
    """The nodes of drawn parameters while nobody knows which there are: each is made when it is asked for."""

    def __init__(self, make: Callable[[str], Node]) -> None:
        self._make = make
        self._made: dict[str, Node] = {}

    def __getitem__(self, key: str) -> Node:
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]

    def __contains__(self, key: object) -> bool:
        raise NamesUnknown

    def __iter__(self) -> Iterator[str]:
        raise NamesUnknown

    def __len__(self) -> int:
        raise NamesUnknown


def is_input(graph: Graph, source: str) -> bool:
    """Whether the graph wants this input: DALI removes those that no output depends on, and refuses to be fed them."""
    try:
        graph.input_feed_count(source)
    except KeyError:
        return False
    return True


def boundary(stages: Sequence[Stage]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields that a run of stages takes from outside, and those that it writes."""
    reads: dict[str, None] = {}
    writes: dict[str, None] = {}
    for stage in stages:
        reads.update(dict.fromkeys(name for name in stage.reads if name not in writes))
        writes.update(dict.fromkeys(stage.writes))
    return tuple(reads), tuple(writes)
