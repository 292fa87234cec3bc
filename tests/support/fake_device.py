"""A device without a GPU, which runs what was issued in the worst order that streams and events allow.

Its memory is host memory. Work that is issued on a stream is kept, and runs only when something forces it: a host
synchronisation, the consumer's own work, or the ``Order`` that the test has chosen. Whoever relies on an order that no
event asks for reads canaries, or the bytes of another batch:

- ``LAZY_COPIES``: a copy runs only when somebody who asked for its event needs it. A consumer who does not wait
  reads canaries; memory on the host that is used again too early is copied with its new contents.
- ``LAZY_CONSUMER``: copies run at once, the consumer's work as late as possible. Device memory that is given away while
  the consumer's work is still to read it, is overwritten.
- an integer: a random order by that seed; copies are half finished then when others' work runs.

Several devices (``beside``) share a host: each has streams, memory and a consumer of its own, any may wait for
another's event and read another's memory, and nothing else brings their work into an order.

The allocator gives a freed block to the next who asks on the stream where it was first taken, as torch's caching
allocator does, unless another stream that was recorded as its user has work to do. Memory of other libraries
(``Foreign``) it knows nothing of.

What real devices do besides: each thread has a current device, on which other libraries make what they make; an error
of a piece of work comes late, with whatever is called next, and again with every call after that; and some calls wait,
which ``waited`` holds, with the thread that was stopped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from minato_gpu.device.accelerator import Accelerator
from tests.support.fake_streams import CANARY as CANARY
from tests.support.fake_streams import CONSUMER as CONSUMER
from tests.support.fake_streams import LAZY_CONSUMER as LAZY_CONSUMER
from tests.support.fake_streams import LAZY_COPIES as LAZY_COPIES
from tests.support.fake_streams import Block, Copy, FakeStreams
from tests.support.fake_streams import FakeEvent as FakeEvent
from tests.support.fake_streams import FakeStream as FakeStream
from tests.support.fake_streams import Foreign as Foreign
from tests.support.fake_streams import Order as Order


class FakeDevice(FakeStreams, Accelerator):
    """A device in its place. ``capacity``: bytes until it says that memory is short; ``beside``: others of the host.

    ``crossed``: tensors copied from another device; ``fetched``: to the host; ``pooled``: bytes that pools of other
    libraries hold and do not use; ``trims``: how often they were asked for them.
    """

    compute = "cpu"
    keeps_time = False  # what it computes, the calling thread does: that tells how long it took
    uuid = "none"
    device = torch.device("cpu")

    def __init__(self, order: Order = LAZY_COPIES, capacity: int = 1 << 30, beside: Sequence[FakeDevice] = ()) -> None:
        super().__init__(order, beside)
        self.pinned: dict[int, int] = {}
        self.entered: list[str] = []  # names of threads whose current device it is
        self.capacity = capacity
        self.used = 0
        self.peak = 0
        self.crossed = self.fetched = self.pooled = self.trims = 0
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

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the consumer's ``tensor.to(device)`` returns."""
        made = self.empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        self.read(made, lambda memory: memory.copy_(tensor))  # type: ignore[arg-type]
        return made

    # --- Accelerator ---------------------------------------------------------------------------------------------

    def enter(self) -> None:
        self.entered.append(threading.current_thread().name)
        self._threads.device = self.everyone.index(self)

    def empty(self, nbytes: int) -> torch.Tensor:
        with self.lock:
            block = self._reusable(nbytes)
            self.tell_late_error()
            if block is None:
                if self.used + self.pooled + nbytes > self.capacity:
                    raise torch.OutOfMemoryError(f"fake device: {nbytes} bytes asked for, {self.used} used")
                block = Block(nbytes, self._checked(self.current), self)
            self.used += nbytes
            self.peak = max(self.peak, self.used)
            return self._tensor(block, lambda: self._dropped(block))

    def trim(self) -> None:
        self.trims += 1
        self.pooled = 0

    def host(self, nbytes: int) -> torch.Tensor:
        memory = np.full(nbytes, CANARY, np.uint8)
        address = memory.ctypes.data
        self.pinned[address] = nbytes
        weakref.finalize(memory, self.pinned.pop, address)
        return torch.from_numpy(memory)

    def copy(self, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        if not all(map(self._reaches, (*into, *sources))):
            self.waits("a copy of memory that is not pinned")
        blocks = map(self._block, sources)
        self.crossed += sum(block is not None and block.device is not self for block in blocks)
        if into:
            self._issue(Copy([self._raw(one) for one in into], [self._raw(source) for source in sources]))

    def _reaches(self, tensor: torch.Tensor) -> bool:
        """Whether the device can read and write the memory by itself."""
        address = tensor.data_ptr()
        pinned = self.pinned.copy()  # other threads change it
        ours = any(a <= address and address + tensor.nbytes <= a + n for a, n in pinned.items())
        return ours or not tensor.nbytes or self._block(tensor) is not None

    def adopt(self, value: Any) -> torch.Tensor:
        """See Accelerator: onto this device by work of the current stream, as what made it would be. What is
        ``Foreign`` lies there already."""
        if isinstance(value, Foreign):
            assert value.device is self, "made on another device, which was the thread's current one"
            return self._tensor(value.block, value.let_go).view(_dtype(value.dtype)).view(value.shape)
        array = np.array(value)
        tensor = self.empty(array.nbytes).view(_dtype(array.dtype)).view(array.shape)
        self._issue(Copy([self._raw(tensor)], [torch.from_numpy(array)]))
        return tensor

    def fetch(self, tensor: torch.Tensor, event: Any) -> Any:
        self.fetched += 1
        self.waits("a copy to the host")
        self.run_to(event)
        self.tell_late_error()
        return self._raw(tensor).clone().numpy()

    def event(self, timed: bool = False) -> Any:
        with self.lock:
            self.tell_late_error()
            return FakeEvent(self, self._checked(self.current))

    def seconds(self, begin: Any, end: Any) -> float:
        """See Accelerator: a piece of work takes a second."""
        assert begin.stream is end.stream and begin.passed and end.passed
        return float(end.number - begin.number)

    def wait(self, event: Any) -> None:
        self._issue(event)

    def used_here(self, tensor: torch.Tensor) -> None:
        with self.lock:
            block = self._block(tensor)
            assert block is not None and block.device is self, "no memory of this device"
            if not block.foreign:  # PyTorch's allocator knows nothing of it, and says so to nobody
                block.users.add(self.current)

    def pin(self, address: int, nbytes: int) -> None:
        assert all(address + nbytes <= a or a + n <= address for a, n in self.pinned.copy().items()), "pinned twice"
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        end = address + self.pinned.pop(address)
        with self.lock:
            streams = [stream for device in self.everyone for stream in device.streams]
            copies = [work for stream in streams for work in stream.work if isinstance(work, Copy)]
            assert not any(copy.reads(address, end) for copy in copies), "the device may still read it"

    # --- memory --------------------------------------------------------------------------------------------------

    def _reusable(self, nbytes: int) -> Block | None:
        for block in reversed(self._free):
            fits = block.memory.nbytes == nbytes and block.home is self.current
            if fits and all(guard.passed for guard in block.guards):
                self._free.remove(block)
                block.users, block.guards = set(), []
                return block
        return None

    def _tensor(self, block: Block, dropped: Callable[[], None]) -> torch.Tensor:
        """The block's memory as bytes; ``dropped`` is called when the last tensor on it has died."""
        array = np.frombuffer(block.memory.data, np.uint8)
        address = array.ctypes.data
        with self.lock:
            if array.nbytes:
                self._live[address] = block
            weakref.finalize(array, self._gone, address, array.nbytes, dropped)
        return torch.from_numpy(array)

    def _gone(self, address: int, nbytes: int, dropped: Callable[[], None]) -> None:
        with self.lock:
            if nbytes:
                del self._live[address]
            dropped()

    def _dropped(self, block: Block) -> None:
        with self.lock:
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


def _dtype(dtype: Any) -> torch.dtype:
    """PyTorch's name of NumPy's type."""
    return torch.from_numpy(np.empty(0, dtype)).dtype
