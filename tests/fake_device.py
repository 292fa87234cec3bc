"""A device without a GPU, which runs what was issued in the worst order that streams and events allow.

Its memory is host memory. Work that is issued on a stream is kept, and runs only when something forces it: a host
synchronisation, the consumer's own work, or the ``Order`` that the test has chosen. Whoever relies on an order that no
event asks for reads canaries, or the bytes of another batch:

- ``LAZY_COPIES``: a copy runs only when somebody who asked for its event needs it. A consumer who does not wait
  reads canaries; memory on the host that is used again too early is copied with its new contents.
- ``LAZY_CONSUMER``: copies run at once, the consumer's work as late as possible. Device memory that is given away while
  the consumer's work is still to read it, is overwritten.
- an integer: a random order by that seed.

Several devices (``beside``) share a host: each has streams, memory and a consumer of its own, any may wait for
another's event and read another's memory, and nothing else brings their work into an order.

The allocator gives a freed block to the next who asks on the stream where it was first taken, as torch's caching
allocator does, unless another stream that was recorded as its user has work to do.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tests.fake_work import CANARY as CANARY
from tests.fake_work import Block, Copy
from tests.fake_work import FakeEvent as FakeEvent
from tests.fake_work import FakeStream as FakeStream

CONSUMER = "consumer"
LAZY_COPIES, LAZY_CONSUMER = "lazy copies", "lazy consumer"
Order = str | int


class FakeDevice:
    """An ``Accelerator``. ``capacity``: bytes until it says that memory is short; ``beside``: others of the host.

    ``crossed``: tensors copied from another device; ``fetched``: to the host.
    """

    compute = "cpu"
    keeps_time = False  # what it computes, the calling thread does: that tells how long it took
    uuid = "none"
    device = torch.device("cpu")

    def __init__(self, order: Order = LAZY_COPIES, capacity: int = 1 << 30, beside: Sequence[FakeDevice] = ()) -> None:
        self.lock: Any = beside[0].lock if beside else threading.RLock()
        self.everyone: list[FakeDevice] = beside[0].everyone if beside else []
        self.everyone.append(self)
        self.order = order
        self.random = np.random.default_rng(order if isinstance(order, int) else 0)
        self.consumer = FakeStream(CONSUMER)
        self.streams = [self.consumer]
        self.pinned: dict[int, int] = {}
        self.entered: list[str] = []  # names of threads whose current device it is
        self.capacity = capacity
        self.used = 0
        self.peak = 0
        self._current = threading.local()
        self.crossed = self.fetched = 0
        self._live: dict[int, Block] = beside[0]._live if beside else {}
        self._free: list[Block] = []

    # --- the consumer's work -------------------------------------------------------------------------------------

    def kernel(self, function: Callable[[], None]) -> None:
        """The consumer's work on its stream; it keeps nothing alive that its arguments do not."""
        self._issue(function, self.consumer)
        with self.lock:
            if self.order == LAZY_COPIES:
                self._drain(self.consumer)

    def read(self, tensor: torch.Tensor, check: Callable[[torch.Tensor], None]) -> None:
        """A kernel that reads a tensor; the tensor itself may be dropped at once, as with a real one."""
        memory = self._raw(tensor)
        self.kernel(lambda: check(memory))

    def finish(self) -> None:
        """Run everything; the consumer's work first where nothing stands against it."""
        with self.lock:
            for stream in self.streams:
                self._drain(stream)

    # --- Accelerator ---------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """See Accelerator."""
        self.entered.append(threading.current_thread().name)

    def stream(self) -> FakeStream:
        """See Accelerator."""
        with self.lock:
            self.streams.append(FakeStream(f"stream {len(self.streams)}"))
            return self.streams[-1]

    @contextmanager
    def running(self, stream: FakeStream) -> Iterator[FakeStream]:
        """See Accelerator."""
        before = self.current
        self._current.stream = stream
        try:
            yield stream
        finally:
            self._current.stream = before

    working = running

    @property
    def current(self) -> FakeStream:
        """The current stream of this thread."""
        return getattr(self._current, "stream", self.consumer)

    def empty(self, nbytes: int) -> torch.Tensor:
        """See Accelerator."""
        with self.lock:
            block = self._reusable(nbytes)
            if block is None:
                if self.used + nbytes > self.capacity:
                    raise torch.OutOfMemoryError(f"fake device: {nbytes} bytes asked for, {self.used} used")
                block = Block(nbytes, self._checked(self.current), self)
            self.used += nbytes
            self.peak = max(self.peak, self.used)
            array = np.frombuffer(block.memory.data, np.uint8)
            if nbytes:
                self._live[array.ctypes.data] = block
            weakref.finalize(array, self._dropped, array.ctypes.data, block)
            return torch.from_numpy(array)

    def host(self, nbytes: int) -> torch.Tensor:
        """See Accelerator."""
        return torch.full((nbytes,), CANARY, dtype=torch.uint8)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """See Accelerator."""
        self._issue(Copy(self._raw(into), self._raw(source)))

    def scatter(self, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """See Accelerator."""
        pairs = [(self._raw(one), self._raw(other)) for one, other in zip(into, sources, strict=True)]
        self.crossed += sum(not self.owns(source) for source in sources)

        def scatter() -> None:
            for one, other in pairs:
                one.copy_(other)

        self._issue(scatter)

    def adopt(self, value: Any) -> torch.Tensor:
        """See Accelerator: onto this device by work of the current stream, as what made it would be."""
        array = np.array(value)
        tensor = self.empty(array.nbytes).view(torch.from_numpy(array.reshape(-1)[:0]).dtype).view(array.shape)
        self.copy(tensor, torch.from_numpy(array))
        return tensor

    def fetch(self, tensor: torch.Tensor, event: Any) -> Any:
        """See Accelerator."""
        self.fetched += 1
        self.run_to(event)
        return self._raw(tensor).clone().numpy()

    def event(self, timed: bool = False) -> FakeEvent:
        """See Accelerator."""
        with self.lock:
            return FakeEvent(self, self._checked(self.current))

    def seconds(self, begin: FakeEvent, end: FakeEvent) -> float:
        """See Accelerator: a piece of work takes a second."""
        assert begin.stream is end.stream and begin.passed and end.passed
        return float(end.number - begin.number)

    @staticmethod
    def _checked(stream: FakeStream) -> FakeStream:
        """The consumer's stream is not for the loader's own threads: they would wait for what it computes."""
        ours = threading.current_thread().name.startswith("minato-")
        assert not (ours and stream.name == CONSUMER), "a thread of the loader's uses the consumer's stream"
        return stream

    def wait(self, event: Any) -> None:
        """See Accelerator."""
        self._issue(event)

    def used_here(self, tensor: torch.Tensor) -> None:
        """See Accelerator."""
        with self.lock:
            block = self._block(tensor)
            assert block is not None and block.device is self, "no memory of this device"
            block.users.add(self.current)

    def pin(self, address: int, nbytes: int) -> None:
        """See Accelerator."""
        assert all(address + nbytes <= a or a + n <= address for a, n in self.pinned.items()), "pinned twice"
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        """See Accelerator."""
        end = address + self.pinned.pop(address)
        with self.lock:
            streams = [stream for device in self.everyone for stream in device.streams]
            copies = [work for stream in streams for work in stream.work if isinstance(work, Copy)]
            assert not any(address <= copy.source.data_ptr() < end for copy in copies), "the device may still read it"

    # --- order ---------------------------------------------------------------------------------------------------

    def run_to(self, event: FakeEvent) -> None:
        """Run a stream up to an event, and what it waits for."""
        with self.lock:
            while not event.passed:
                self._step(event.stream)

    def _issue(self, work: Any, stream: FakeStream | None = None) -> None:
        with self.lock:
            stream = self._checked(stream or self.current)
            stream.work.append(work)
            stream.issued += 1
            if self.order == LAZY_CONSUMER and stream is not self.consumer:
                self._drain(stream)
            elif isinstance(self.order, int):
                for _ in range(int(self.random.integers(0, 4))):
                    self._step(self.streams[int(self.random.integers(0, len(self.streams)))])

    def _drain(self, stream: FakeStream) -> None:
        while stream.work:
            self._step(stream)

    def _step(self, stream: FakeStream) -> None:
        if not stream.work:
            return
        work = stream.work[0]
        if isinstance(work, FakeEvent):
            self.run_to(work)
        else:
            work()
        stream.work.popleft()
        stream.done += 1

    # --- memory --------------------------------------------------------------------------------------------------

    def _reusable(self, nbytes: int) -> Block | None:
        for block in reversed(self._free):
            fits = block.memory.nbytes == nbytes and block.home is self.current
            if fits and all(guard.passed for guard in block.guards):
                self._free.remove(block)
                block.users, block.guards = set(), []
                return block
        return None

    def _dropped(self, address: int, block: Block) -> None:
        with self.lock:
            if block.memory.nbytes:
                del self._live[address]
            self.used -= block.memory.nbytes
            block.guards = [FakeEvent(self, user) for user in block.users if user is not block.home]
            self._free.append(block)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on this device."""
        block = self._block(tensor)
        return block is not None and block.device is self

    def _block(self, tensor: torch.Tensor) -> Block | None:
        with self.lock:
            return self._live.get(tensor.untyped_storage().data_ptr())

    def _raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements, without keeping the tensor's memory from being freed."""
        block = self._block(tensor)
        if block is None:
            return tensor
        raw = torch.empty(0, dtype=tensor.dtype)
        return raw.set_(block.all.untyped_storage(), int(tensor.storage_offset()), tensor.shape, tensor.stride())
