"""Graphs built ahead: before there is a sample where that can be, else with the draws of the first that has some."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from minato_gpu.lanes.graph_prebuild import BuildAhead


class Graphs:
    """An executor whose graph is built, or waits for a sample, or cannot be built. ``tried``: what it was to be built
    from."""

    def __init__(self, *, waits: bool = False, error: Exception | None = None) -> None:
        self.waits, self.error = waits, error
        self.tried: list[Any] = []

    def draws(self, fields: Mapping[str, Any], seed: int) -> dict[int, Any]:
        """See DeviceExecutor."""
        if fields["bad"]:
            raise ValueError("bad draw")
        return {2: {"seed": seed}}

    def build(self, params: Any) -> None:
        """See DeviceExecutor."""
        self.tried.append(params)
        if self.waits and not params:
            raise LookupError("names are not known")
        if self.error is not None:
            raise self.error


def made(*graphs: Graphs) -> BuildAhead:
    return BuildAhead(dict(enumerate(graphs, start=2)))  # type: ignore[arg-type]


def test_what_needs_no_sample_is_built_at_once_and_only_once() -> None:
    one, other = Graphs(), Graphs()
    ahead = made(one, other)
    ahead.open()
    ahead.start([({"bad": False}, 7)])
    assert one.tried == other.tried == [{}]


def test_what_waits_for_a_sample_passes_over_those_that_cannot_be_drawn_for() -> None:
    graphs = Graphs(waits=True)
    ahead = made(graphs)
    ahead.open()
    ahead.start([({"bad": True}, 6)])
    assert graphs.tried == [{}]
    for _ in range(2):
        ahead.start([({"bad": True}, 6), ({"bad": False}, 7), ({"bad": False}, 8)])
    assert graphs.tried == [{}, {2: {"seed": 7}}]


def test_a_graph_that_cannot_be_built_is_left_alone_and_the_next_one_built(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Graphs(error=RuntimeError("no such operator")), Graphs(waits=True)
    ahead = made(bad, good)
    with caplog.at_level(logging.WARNING):
        ahead.open()
        for _ in range(2):
            ahead.start([({"bad": False}, 7)])
    assert len(bad.tried) == len(good.tried) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "the device's graph from stage 2 on cannot be built (no such operator)"
    ]
