"""The streams of a fake device: which work runs when, on which of them a thread issues it, and who waits for it; and
what work is about: events, copies, memory that shows who wrote it last."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

if TYPE_CHECKING:
    from tests.support.fake_device import FakeDevice

CONSUMER = "consumer"
LAZY_COPIES, LAZY_CONSUMER = "lazy copies", "lazy consumer"
Order = str | int
CANARY = 0xEE


class FakeStream:
    """Work in its order: functions, and events to wait for. ``done`` counts what has run."""

    def __init__(self, name: str, device: FakeDevice) -> None:
        self.name = name
        self.device = device
        self.work: deque[Any] = deque()
        self.issued = self.done = 0


class FakeEvent:
    """After the first ``number`` pieces of work of a stream."""

    def __init__(self, device: FakeDevice, stream: FakeStream) -> None:
        self._device = device
        self.stream = stream
        self.number = stream.issued

    @property
    def passed(self) -> bool:
        """Whether the stream has come to it."""
        return self.stream.done >= self.number

    def query(self) -> bool:
        with self._device.lock:
            self._device.tell_late_error()
            return self.passed

    def synchronize(self) -> None:
        if not self.passed:
            self._device.waits("an event")
        self._device.run_to(self)
        self._device.tell_late_error()


class Copy:
    """The work of copying tensors into others, in two halves: work of other streams may come between them. Called until
    it is done, which it tells."""

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self.targets = [target.reshape(-1) if target.is_contiguous() else target for target in targets]
        self.sources = [source.reshape(target.shape) for source, target in zip(sources, self.targets, strict=True)]
        self._begun = False

    def __call__(self) -> bool:
        for target, source in zip(self.targets, self.sources, strict=True):
            half = target.shape[0] // 2 if target.dim() else 0
            part = slice(half, None) if self._begun else slice(0, half)
            if target.dim():
                target[part].copy_(source[part])
            elif self._begun:
                target.copy_(source)
        done, self._begun = self._begun, True
        return done

    def reads(self, begin: int, end: int) -> bool:
        """Whether it has yet to read anything of these addresses."""
        return any(begin <= source.data_ptr() < end for source in self.sources)


class Block:
    """Memory that is never returned to the host's allocator, so that a late write destroys no innocent's bytes."""

    def __init__(self, nbytes: int, home: FakeStream, device: FakeDevice, *, foreign: bool = False) -> None:
        self.device, self.foreign = device, foreign
        self.memory = np.full(nbytes, CANARY, np.uint8)
        self.all = torch.from_numpy(self.memory)
        self.home = home
        self.users: set[FakeStream] = set()
        self.guards: list[FakeEvent] = []


class Foreign:
    """What another library (CuPy, DALI) has made, in memory of its own: PyTorch borrows it, and copies nothing.

    Once the last tensor on it has died, its library waits for the whole device, in whichever thread dropped that
    tensor, and uses the memory again, on streams that nobody knows. Made on the device that is the calling thread's
    current one, whatever stream is.
    """

    def __init__(self, device: FakeDevice, value: Any) -> None:
        array = np.ascontiguousarray(value)
        self.device = device.everyone[device.current_device]
        self.dtype, self.shape = array.dtype, array.shape
        self.block = Block(array.nbytes, self.device.current, self.device, foreign=True)
        self.block.memory[:] = array.reshape(-1).view(np.uint8)

    def let_go(self) -> None:
        """Nobody holds it any more."""
        self.device.waits("a deleter")
        self.block.memory[:] = CANARY


class FakeStreams:
    """Streams in the ``order`` that a test has chosen, see ``fake_device``.

    ``waited``: which threads have waited for the device, and for what; ``error``: of work that has failed.
    """

    def __init__(self, order: Order, beside: Sequence[FakeDevice]) -> None:
        self.lock: Any = beside[0].lock if beside else threading.RLock()
        self.everyone: list[FakeDevice] = beside[0].everyone if beside else []
        self.everyone.append(self._this)
        self.order = order
        self.random = np.random.default_rng(order if isinstance(order, int) else 0)
        self.consumer = FakeStream(CONSUMER, self._this)
        self.streams = [self.consumer]
        self.waited: list[tuple[str, str]] = []
        self.error: Exception | None = None
        self._current = threading.local()
        self._threads: Any = beside[0]._threads if beside else threading.local()

    @property
    def _this(self) -> FakeDevice:
        return cast("FakeDevice", self)

    def stream(self) -> Any:
        with self.lock:
            self.streams.append(FakeStream(f"stream {len(self.streams)}", self._this))
            return self.streams[-1]

    @contextmanager
    def running(self, stream: Any) -> Iterator[Any]:
        before, device = self.current, self.current_device
        self._current.stream, self._threads.device = stream, self.everyone.index(self._this)
        try:
            yield stream
        finally:
            self._current.stream, self._threads.device = before, device

    working = running

    @property
    def current_device(self) -> int:
        """The calling thread's current device: a number in ``everyone``."""
        return getattr(self._threads, "device", 0)

    @property
    def current(self) -> FakeStream:
        """The current stream of this thread."""
        return getattr(self._current, "stream", self.consumer)

    @staticmethod
    def _checked(stream: FakeStream) -> FakeStream:
        """The consumer's stream is not for the loader's own threads: they would wait for what it computes."""
        ours = threading.current_thread().name.startswith("minato-")
        assert not (ours and stream.name == CONSUMER), "a thread of the loader's uses the consumer's stream"
        return stream

    def finish(self) -> None:
        """Run everything; the consumer's work first where nothing stands against it."""
        with self.lock:
            for stream in self.streams:
                self._drain(stream)

    def run_to(self, event: Any) -> None:
        """Run a stream up to an event, and what it waits for."""
        with self.lock:
            while not event.passed:
                self._step(event.stream)

    def waits(self, what: str) -> None:
        """The calling thread waits."""
        self.waited.append((threading.current_thread().name, what))

    def fail(self, error: Exception) -> None:
        """A piece of work on the current stream that will fail."""

        def work() -> None:
            raise error

        self._issue(work)

    def tell_late_error(self) -> None:
        """Raise the error of work that has failed: it is nobody's who is told."""
        if self.error is not None:
            raise self.error

    def _issue(self, work: Any, stream: FakeStream | None = None) -> None:
        with self.lock:
            self.tell_late_error()
            stream = self._checked(stream or self.current)
            stream.work.append(work)
            stream.issued += 1
            if self.order == LAZY_CONSUMER and stream is not self.consumer:
                self._drain(stream)
            elif isinstance(self.order, int):
                for _ in range(int(self.random.integers(0, 4))):
                    self._step(self.streams[int(self.random.integers(0, len(self.streams)))])

    def _drain(self, stream: Any) -> None:
        while stream.work:
            self._step(stream)

    def _step(self, stream: Any) -> None:
        if not stream.work:
            return
        work = stream.work[0]
        done: object = True
        if isinstance(work, FakeEvent):
            self.run_to(work)
        else:
            try:
                done = work()
            except Exception as error:
                self.error = error
        if done is not False:
            stream.work.popleft()
            stream.done += 1
