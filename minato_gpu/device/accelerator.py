"""All calls to CUDA for streams, events, memory and copies.

``Accelerator`` is the loader's interface to one device. It uses torch, which is also the consumer's library: one
caching allocator serves both, and its streams are those on which the consumer computes. The tests replace it by a
device that runs issued work in the worst order that events allow (``tests/support/fake_device.py``), so that a missing
event is found without a GPU.

Operations are issued on the *current stream* of the calling thread and return at once. Outside ``running`` and
``working`` that is the stream on which the consumer trains, also in the loader's own threads: only the hand-over of a
batch belongs there. ``fetch``, ``await_stream`` and ``Event.synchronize`` wait on the host, and ``trim`` may;
the device lane's thread calls them, and whoever closes a loader or copies a sample back to the host.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.utils.dlpack
from numpy.typing import NDArray

from minato_gpu.samples import Value

Event = torch.cuda.Event
"""A point in the work of a stream."""

Stream = torch.cuda.Stream
"""A queue of device work."""


class HeldUntilPassed:
    """References to what a device still reads, such as the sources of copies. Any thread may call its methods."""

    def __init__(self) -> None:
        self._held: deque[tuple[Event | None, tuple[object, ...]]] = deque()  # oldest first
        self._lock = threading.Lock()

    def hold(self, event: Event | None, *things: object) -> None:
        """Holds ``things`` until ``event`` has passed; if it is None (issuing failed), until a later one has."""
        self._held.append((event, things))

    def sweep(self) -> None:
        """Drops what the device has finished reading; never waits. Keeps it where the device fails to answer."""
        passed = 0
        with self._lock:
            with suppress(Exception):
                for number, (event, _) in enumerate(list(self._held), 1):
                    if event is not None:
                        if not event.query():
                            break
                        passed = number
            dropped = [self._held.popleft() for _ in range(passed)]
        dropped.clear()  # outside the lock: destructors may run

    def wait(self) -> None:
        """Waits for all events that were given, so until the device has finished reading. Errors are ignored: a failed
        device reads nothing, and whatever is issued next reports them."""
        for event, _ in list(self._held):
            if event is not None:
                with suppress(Exception):
                    event.synchronize()

    def close(self) -> None:
        """Waits for the device and drops everything. Idempotent."""
        self.wait()
        with self._lock:
            dropped, self._held = self._held, deque()
        dropped.clear()


class Accelerator:
    """One CUDA device, through torch; without an index the thread's current one. Raises RuntimeError or AssertionError
    where torch finds none."""

    keeps_time = True  # events measure device time; see ``seconds``

    def __init__(self, device: torch.device) -> None:
        number: int | None = device.index
        index = torch.cuda.current_device() if number is None else number
        self.device = torch.device("cuda", index)  # on which batches live
        self.compute = str(self.device)  # "cuda:N", for executors
        self.uuid = str(torch.cuda.get_device_properties(index).uuid)  # NVML's, without "GPU-" or "MIG-"
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # for copies, by device

    def enter(self) -> None:
        """Makes this device current in the calling thread. A new thread begins with device 0, on which libraries would
        otherwise allocate memory in every rank."""
        torch.cuda.set_device(self.device)

    def stream(self) -> Stream:
        """Returns a new stream of priority 0, the lowest and that of the default stream. A training loop can only get
        ahead of it on a stream of priority -1."""
        return torch.cuda.Stream(self.device, priority=0)

    def running(self, stream: Stream) -> AbstractContextManager[object]:
        """Context in which ``stream`` is the current stream."""
        return _on(self.device, stream)

    @contextmanager
    def working(self, stream: Stream) -> Iterator[None]:
        """Context for device implementations: torch and CuPy issue to ``stream``, which no other thread makes current
        meanwhile. Entering the stream itself takes a tenth of the time of ``torch.cuda.stream``."""
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self.device))
            stack.enter_context(stream)
            stack.enter_context(torch.cuda.nvtx.range("minato_gpu: device stages"))
            if "cupy" in sys.modules:  # imported by an executor whose stages need it
                cuda = sys.modules["cupy"].cuda
                stack.enter_context(cuda.Device(self.device.index))
                stack.enter_context(_for_cupy(cuda, stream))
            yield

    def empty(self, nbytes: int) -> torch.Tensor:
        """Returns uninitialised uint8 memory of shape (nbytes,), freed with its last view (see ``used_here``).

        Raises an error for which ``is_out_of_memory`` is true.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def trim(self) -> None:
        """Frees memory that the pools of PyTorch, CuPy and DALI hold unused, as far as these are imported. May wait for
        the device."""
        torch.cuda.empty_cache()
        if "cupy" in sys.modules:
            cupy = sys.modules["cupy"]
            with cupy.cuda.Device(self.device.index):
                cupy.get_default_memory_pool().free_all_blocks()
        if "nvidia.dali.backend" in sys.modules:
            sys.modules["nvidia.dali.backend"].ReleaseUnusedMemory()

    def host(self, nbytes: int) -> torch.Tensor:
        """Returns uninitialised pinned uint8 memory of the host, shape (nbytes,). It is reused once its last view is
        dropped and the device has finished copies from and to it; PyTorch's allocator keeps it."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copies many tensors between this device and the host's pinned memory or other devices; none may change until
        an event recorded afterwards has passed. One call per source device, which releases the interpreter lock; on
        devices tensors of one dtype are copied together.

        Between devices torch copies on the source's current stream and makes both streams wait for each other. So a
        copy stream of that device is made current: never the stream on which it trains.
        """
        for device in {source.device for source in sources}:
            pairs = [pair for pair in zip(into, sources, strict=True) if pair[1].device == device]
            targets, found = [one for one, _ in pairs], [other for _, other in pairs]
            here = device.type == "cpu" or device == self.device
            with nullcontext() if here else _on(device, self._copy_stream(device)):
                torch._foreach_copy_(targets, found, non_blocking=True)

    def _copy_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Returns this object's own stream on ``device`` (this or another), for copies from there."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=0)
        return self._streams[device]

    def adopt(self, value: Value) -> torch.Tensor:
        """Returns a value of DALI, CuPy or torch as a tensor on this device. DLPack makes the current stream wait for
        the work of DALI and CuPy; a tensor of torch must be ready on the current stream already."""
        tensor: torch.Tensor = value if isinstance(value, torch.Tensor) else torch.utils.dlpack.from_dlpack(value)
        return tensor if tensor.device == self.device else tensor.to(self.device, non_blocking=True)

    def fetch(self, tensor: torch.Tensor, event: Event) -> NDArray[Value]:
        """Returns a tensor's elements as a new array on the host. Waits for ``event``, on a stream of its own, and for
        nothing else."""
        with _on(self.device, self._copy_stream(self.device)):
            self.wait(event)
            array: NDArray[Value] = tensor.cpu().numpy()
        return array

    def event(self, timed: bool = False) -> Event:
        """Records an event after everything issued on the current stream; ``timed``: for ``seconds``.

        Waiting for it sleeps; CUDA's default is to spin on a core that workers could use.
        """
        event = torch.cuda.Event(enable_timing=timed, blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, begin: Event, end: Event) -> float:
        """Returns the seconds on the device between two timed events of one stream, both passed."""
        return float(begin.elapsed_time(end)) * 1e-3

    def wait(self, event: Event) -> None:
        """Makes later work of the current stream wait for ``event``."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def used_here(self, tensor: torch.Tensor) -> None:
        """Records the current stream as a user of the tensor's memory, which is not reused before its work has
        ended."""
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def pin(self, address: int, nbytes: int) -> None:
        """Pins host memory for all devices of the process. Raises RuntimeError where CUDA refuses."""
        with torch.cuda.device(self.device):
            error = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 1))
            if error:
                self._forget_error()
                raise RuntimeError(f"cudaHostRegister of {nbytes} bytes failed with error {error}")

    def unpin(self, address: int) -> None:
        """Reverses ``pin``; no copy may use the memory any more."""
        with torch.cuda.device(self.device):
            if int(torch.cuda.cudart().cudaHostUnregister(address)):
                self._forget_error()

    def _forget_error(self) -> None:
        # The runtime would report a failed call's error at the next kernel of this thread.
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)


@contextmanager
def _on(device: torch.device, stream: Stream) -> Iterator[None]:
    """Context in which a device and a stream are current.

    On leaving a stream of another device, PyTorch makes a context on the device that was current before (device 0,
    say); on leaving a device it returns only to an existing context. Hence both.
    """
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def gpu_name(device: str) -> str:
    """Returns the GPU's product name; "" where torch has no CUDA."""
    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""


def await_stream(stream: Stream) -> None:
    """Waits, asleep, until all work issued on the stream has ended."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    event.synchronize()


def enter_same() -> Callable[[], None]:
    """Returns a function that makes this thread's current device current in another thread; it does nothing if this
    process has not initialised CUDA."""
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


def _for_cupy(cuda: Any, stream: Stream) -> AbstractContextManager[object]:
    """Returns a context in which CuPy's current stream is this stream of torch. ``cuda``: the module ``cupy.cuda``."""
    if hasattr(cuda.Stream, "from_external"):  # CuPy 14, which warns of the other
        found: AbstractContextManager[object] = cuda.Stream.from_external(stream)
    else:
        found = cuda.ExternalStream(stream.cuda_stream, stream.device_index)
    return found


_PHRASES = (
    "out of memory",
    "cuda_error_out_of_memory",
    "cudaerrormemoryallocation",
    "bad_alloc",
    "cuda allocation failed",  # these two are DALI's own (dali/core/cuda_error.h)
    "can't allocate",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True when the error, or one that caused it, is a shortage of memory, of a device or the host: torch, CuPy
    and DALI each report it differently, DALI only in words."""
    following: BaseException | None = error
    for _ in range(16):
        if following is None:
            return False
        if isinstance(following, MemoryError) or type(following).__name__ == "OutOfMemoryError":
            return True
        text = str(following).lower()
        if isinstance(following, RuntimeError) and any(phrase in text for phrase in _PHRASES):
            return True
        following = following.__cause__ or following.__context__
    return False


def available(device: torch.device) -> bool:
    """Returns whether this PyTorch can use the CUDA device; False for a device of another kind."""
    return device.type == "cuda" and torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
