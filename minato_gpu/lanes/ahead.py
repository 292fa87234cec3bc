"""Graphs built ahead of need: those of a pipeline's split points, in a thread of their own, so that no batch waits.

A graph that has failed is lost, and with it its split point is no longer offered; samples that would build it again by
coming there do not come. So it is built again here, from the draws kept. Where that never lasts it is not done for
ever: ``_REBUILDS`` times for a split point, and once more for every ``_RUNS`` micro-batches that have run there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minato_gpu.lanes.device import DeviceExecutor, Fields
from minato_gpu.notices import LOGGER, say_once
from minato_gpu.threads import OwnThread

_REBUILDS = 3
_RUNS = 100


class BuildAhead:
    """Keeps the graphs of ``executors``, by split point, built. ``on_thread`` is called first in each new thread."""

    def __init__(self, executors: Mapping[int, DeviceExecutor], on_thread: Callable[[], None]) -> None:
        self._executors = executors
        self._on_thread = on_thread
        self._draws: dict[int, Mapping[int, Mapping[str, Any]]] | None = None
        self._tried: set[int] = set()
        self._lasting: set[int] = set()  # built, or lost since then
        self._left = dict.fromkeys(executors, _REBUILDS)
        self._runs = dict.fromkeys(executors, 0)
        self._thread: threading.Thread | None = None
        self._closing = False

    def start(self, samples: Sequence[tuple[Fields, int]]) -> None:
        """Begin, with the draws of the first of these samples for which nothing raises, if there is one."""
        if self._draws is not None:
            return
        for fields, seed in samples:
            try:
                self._draws = {split: executor.draws(fields, seed) for split, executor in self._executors.items()}
            except Exception:  # noqa: S112 - its own business: it fails by itself where it is prepared
                continue
            self._go_on()
            return

    def ran(self, split: int) -> None:
        """A micro-batch has run there, and may have cost the graph."""
        if split in self._runs:
            self._runs[split] += 1
            if self._runs[split] % _RUNS == 0:
                self._left[split] = max(1, self._left[split])
        if self._draws is not None:
            self._go_on()

    def close(self) -> None:
        """Wait for the graph that is being built, and build no other. Idempotent."""
        self._closing = True
        if self._thread is not None:
            self._thread.join()

    def _go_on(self) -> None:
        running = self._thread is not None and self._thread.is_alive()
        if not running and not self._closing and self._due() is not None:
            thread = OwnThread(target=self._build, name="minato-build", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # there is none to be had now: the next micro-batch that runs asks again
                say_once(f"samples are not cut for now: their graphs cannot be built ahead ({error})")
                return
            self._thread = thread

    def _due(self) -> int | None:
        """The first split point whose graph should be there and is not."""
        for split, executor in self._executors.items():
            if executor.built:
                self._lasting.add(split)
            elif split not in self._tried or (split in self._lasting and self._left[split] > 0):
                return split
        return None

    def _build(self) -> None:
        assert self._draws is not None
        self._on_thread()
        while not self._closing and (split := self._due()) is not None:
            if split in self._tried:
                self._left[split] -= 1
            self._tried.add(split)
            try:
                self._executors[split].build(self._draws[split])
            except Exception as error:
                self._lasting.discard(split)
                LOGGER.warning("no sample is cut before stage %d: its graph cannot be built (%s)", split, error)
