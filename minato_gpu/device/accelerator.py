"""The seam to a device: every call that the loader makes to CUDA for streams, events, memory and copies is here.

``Accelerator`` is what the loader asks of a device. It answers through torch, which is also the consumer's library: its
caching allocator then serves both, and its streams are the ones that the consumer computes on. The tests answer by a
device that runs what was issued in the worst order that events allow (``tests/support/fake_device.py``), so that a
missing event is found without a GPU.

All operations are issued on the *current stream* of the calling thread and return at once, as in torch. Without
``running`` or ``working`` that is the one on which the consumer trains, also in a thread of the loader's own: nothing
but the hand-over of a batch belongs there. Only ``fetch`` and ``Event.synchronize`` wait on the host; the device lane's
thread calls them, who closes a loader, and who needs a sample on the host after all.
"""

from __future__ import annotations

import sys
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
"""Where work is issued in order."""


class Accelerator:
    """One CUDA device, through torch. Raises RuntimeError or AssertionError where torch finds none.

    ``device``: as the consumer names it; ``compute``: what runs device implementations ("cuda:N"); ``uuid``: as NVML
    knows it, without the "GPU-" or "MIG-" before it; ``keeps_time``: events can tell how long work has taken (see
    ``seconds``).
    """

    keeps_time = True

    def __init__(self, device: torch.device) -> None:
        number: int | None = device.index
        index = torch.cuda.current_device() if number is None else number
        self.device = torch.device("cuda", index)
        self.compute = str(self.device)
        self.uuid = str(torch.cuda.get_device_properties(index).uuid)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._ranges = ranges()

    def enter(self) -> None:
        """The calling thread's current device is this one from now on. A thread of ours begins with the first one, and
        libraries that look for theirs would take memory of it, in every rank."""
        torch.cuda.set_device(self.device)

    def stream(self) -> Stream:
        """A new stream of the lowest priority that the device has. 0 is that, and the default stream's: it cannot be
        undercut, but a training loop on a stream of priority -1 goes first."""
        return torch.cuda.Stream(self.device, priority=0)

    def running(self, stream: Stream) -> AbstractContextManager[object]:
        """What is issued within goes to this stream."""
        return _on(self.device, stream)

    @contextmanager
    def working(self, stream: Stream) -> Iterator[None]:
        """The same for device implementations: torch's and CuPy's work goes to this stream, which nobody else makes
        current meanwhile. The stream as its own context takes a tenth of the time of ``torch.cuda.stream``."""
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self.device))
            stack.enter_context(stream)
            if self._ranges is not None:
                push, pop = self._ranges
                push("minato_gpu: device stages")
                stack.callback(pop)
            if "cupy" in sys.modules:  # an executor imports it when it is loaded, if a stage needs it
                cuda = sys.modules["cupy"].cuda
                stack.enter_context(cuda.Device(self.device.index))
                stack.enter_context(_for_cupy(cuda, stream))
            yield

    def empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialised uint8 memory of shape (nbytes,), free again when its last view dies (see ``used_here``).

        Raises an error that ``is_out_of_memory`` knows.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def trim(self) -> None:
        """Memory that the pools of this process hold there and do not use is free for all again; may wait for the
        device. PyTorch's pool, CuPy's and DALI's; only of libraries that somebody has imported."""
        torch.cuda.empty_cache()
        if "cupy" in sys.modules:
            cupy = sys.modules["cupy"]
            with cupy.cuda.Device(self.device.index):
                cupy.get_default_memory_pool().free_all_blocks()
        if "nvidia.dali.backend" in sys.modules:
            sys.modules["nvidia.dali.backend"].ReleaseUnusedMemory()

    def host(self, nbytes: int) -> torch.Tensor:
        """Uninitialised uint8 memory of the host, shape (nbytes,), pinned; free again when its last view has died and
        the device is through with copies from and to it. PyTorch's allocator keeps what was freed."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between tensors of this device and the CPU; both must stay as they are until an event says so."""
        into.copy_(source, non_blocking=True)

    def copy_all(self, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """``copy`` of many pairs in one call, in which other threads may have the interpreter."""
        if into:
            torch._foreach_copy_(list(into), list(sources), non_blocking=True)

    def scatter(self, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy many tensors of this device or of another one, of one dtype, at once.

        Those of another are made ready for it by an event that the current stream waits for. Between devices torch
        copies on the source's current stream, and lets both wait for each other: that must not be the stream on which
        the source's device trains.
        """
        for device in {source.device for source in sources}:
            pairs = [pair for pair in zip(into, sources, strict=True) if pair[1].device == device]
            targets, found = [one for one, _ in pairs], [other for _, other in pairs]
            with nullcontext() if device == self.device else _on(device, self._beside(device)):
                torch._foreach_copy_(targets, found, non_blocking=True)

    def _beside(self, device: torch.device) -> torch.cuda.Stream:
        """A stream of a device, this one or another, for what comes from there."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=0)
        return self._streams[device]

    def adopt(self, value: Value) -> torch.Tensor:
        """What an executor made (DALI, CuPy, torch), as a tensor on this device, ready on the current stream: DLPack
        makes that wait for the one on which ``value`` was made."""
        tensor: torch.Tensor = value if isinstance(value, torch.Tensor) else torch.utils.dlpack.from_dlpack(value)
        return tensor if tensor.device == self.device else tensor.to(self.device, non_blocking=True)

    def fetch(self, tensor: torch.Tensor, event: Event) -> NDArray[Value]:
        """The elements as a new array on the host, once ``event`` has come to pass: waits for that, and on a stream of
        its own for nothing else, whatever the calling thread's current one is busy with."""
        with _on(self.device, self._beside(self.device)):
            self.wait(event)
            array: NDArray[Value] = tensor.cpu().numpy()
        return array

    def event(self, timed: bool = False) -> Event:
        """An event after all that has been issued on the current stream; ``timed``: ``seconds`` will ask for it.

        Who waits for it sleeps: by default CUDA lets a core spin, which workers could use.
        """
        event = torch.cuda.Event(enable_timing=timed, blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, begin: Event, end: Event) -> float:
        """What passed on the device between two timed events of a stream, both of which have come to pass."""
        return float(begin.elapsed_time(end)) * 1e-3

    def wait(self, event: Event) -> None:
        """What is issued on the current stream from now on comes after the event."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def used_here(self, tensor: torch.Tensor) -> None:
        """The current stream uses this memory, which is not given away before that is done, whoever drops it."""
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def pin(self, address: int, nbytes: int) -> None:
        """Let every device of the process read this host memory by itself. Raises RuntimeError where it cannot."""
        with torch.cuda.device(self.device):
            error = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 1))
            if error:
                self._forget_error()
                raise RuntimeError(f"cudaHostRegister of {nbytes} bytes failed with error {error}")

    def unpin(self, address: int) -> None:
        """Undo ``pin``; what reads the memory must be through."""
        with torch.cuda.device(self.device):
            if int(torch.cuda.cudart().cudaHostUnregister(address)):
                self._forget_error()

    def _forget_error(self) -> None:
        # The runtime keeps a failed call's error for whoever asks next in this thread, an innocent kernel.
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)


@contextmanager
def _on(device: torch.device, stream: Stream) -> Iterator[None]:
    """The calling thread's current device and stream. On leaving a stream of another device, PyTorch makes a context on
    the one that was current before, the first one say; on leaving a device it only goes back to a context there is."""
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def gpu_name(device: str) -> str:
    """What the GPU is called; "" where there is none."""
    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""


def await_stream(stream: Stream) -> None:
    """Wait, asleep, until the stream is through with all that has been issued on it."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    event.synchronize()


def enter_same() -> Callable[[], None]:
    """Called in another thread, it makes the device current that is so in this one, if this process has met CUDA."""
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


def _for_cupy(cuda: Any, stream: Stream) -> AbstractContextManager[object]:
    """CuPy's current stream is this one of torch's. ``cuda``: the module ``cupy.cuda``."""
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
    """Whether an error, or one that caused it, says that memory was not enough: torch, CuPy and DALI each say it
    differently, and DALI only in words."""
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


def ranges() -> tuple[Callable[[str], object], Callable[[], object]] | None:
    """What opens a range that a profiler shows, and what closes it; None where torch finds no CUDA device."""
    return (torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop) if torch.cuda.is_available() else None


def available(device: torch.device) -> bool:
    """Whether this PyTorch can use the device."""
    return device.type == "cuda" and torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
