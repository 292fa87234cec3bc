"""Graphs built ahead: with the draws of a sample that can be drawn for, again when they are lost, and not for ever."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from minato_gpu.lanes.ahead import _REBUILDS, _RUNS, BuildAhead
from minato_gpu.notices import say_once
from minato_gpu.threads import OwnThread
from tests.waiting import wait_until


class Graphs:
    """An executor whose graph is built, or lost, or cannot be built."""

    def __init__(self) -> None:
        self.built = False
        self.builds = 0
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()

    def draws(self, fields: Mapping[str, Any], seed: int) -> dict[int, Any]:
        """See DeviceExecutor."""
        if fields["bad"]:
            raise ValueError("bad draw")
        return {2: {"seed": seed}}

    def build(self, params: Any) -> None:
        """See DeviceExecutor."""
        assert params == {2: {"seed": 7}}
        self.begun.set()
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        self.builds += 1
        self.built = True


def made(*graphs: Graphs) -> BuildAhead:
    return BuildAhead(dict(enumerate(graphs, start=2)), lambda: None)  # type: ignore[arg-type]


def begin(ahead: BuildAhead) -> None:
    ahead.start([({"bad": True}, 6), ({"bad": False}, 7)])


def settled(ahead: BuildAhead) -> bool:
    return wait_until(lambda: ahead._thread is None or not ahead._thread.is_alive())


def test_a_sample_that_cannot_be_drawn_for_is_passed_over() -> None:
    graphs = Graphs()
    ahead = made(graphs)
    ahead.start([({"bad": True}, 6)])
    ahead.ran(2)
    assert ahead._thread is None
    begin(ahead)
    assert settled(ahead) and graphs.builds == 1


def test_a_graph_that_was_lost_is_built_again_but_not_for_ever() -> None:
    graphs = Graphs()
    ahead = made(graphs)
    begin(ahead)
    assert settled(ahead)
    for _ in range(_REBUILDS + 4):
        graphs.built = False
        ahead.ran(2)
        assert settled(ahead)
    assert graphs.builds == 1 + _REBUILDS and not graphs.built
    for _ in range(_RUNS):  # what was on its way, or came after the lane had built it by itself
        ahead.ran(2)
    assert settled(ahead)
    assert graphs.builds == 2 + _REBUILDS and graphs.built


def test_a_graph_that_cannot_be_built_is_left_alone_and_the_next_one_built(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Graphs(), Graphs()
    bad.error = RuntimeError("no such operator")
    ahead = made(bad, good)
    with caplog.at_level(logging.WARNING):
        begin(ahead)
        assert settled(ahead)
        ahead.ran(3)
        assert settled(ahead)
    assert good.built
    assert [record.getMessage() for record in caplog.records] == [
        "no sample is cut before stage 2: its graph cannot be built (no such operator)"
    ]


def test_a_thread_that_is_not_to_be_had_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    graphs = Graphs()
    ahead = made(graphs)
    say_once.cache_clear()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(OwnThread, "start", start)
        begin(ahead)
        ahead.ran(2)
    assert len(caplog.records) == 1 and "can't start new thread" in caplog.text
    ahead.ran(2)
    assert settled(ahead) and graphs.built
    ahead.close()


def test_closing_waits_for_one_graph_and_not_for_all() -> None:
    first, second = Graphs(), Graphs()
    first.gate.clear()
    ahead = made(first, second)
    begin(ahead)
    assert first.begun.wait(30)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    assert wait_until(lambda: ahead._closing)
    first.gate.set()
    closing.join(30)
    assert not closing.is_alive() and first.built and not second.begun.is_set()
    ahead.ran(2)
    assert not second.begun.is_set()
