"""What is asked of CUDA, as far as that shows without one: by stand-ins made after PyTorch's own functions, so that a
wrong name or argument is found, and by CuPy's own classes, which need no device to be made."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from minato_gpu.device import accelerator, nvml
from minato_gpu.device.accelerator import Accelerator

pytestmark = pytest.mark.filterwarnings("error")

MADE: Any = "made"  # an event, by its name
_CYCLES = 1 << 23


class Driver:
    """Takes the place of what ``Accelerator`` asks ``torch.cuda``; ``asked`` says what was asked on which stream.

    ``contexts``: the devices on which memory was taken; ``devices``: which one is current, by thread, the first one at
    the beginning.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.current = "default"
        self.made: list[str] = []
        self.contexts: set[int] = set()
        self.devices: defaultdict[str, int] = defaultdict(int)
        self._of: dict[Any, int] = {}
        instead = {
            "Stream": self._stream,
            "Event": self._event,
            "stream": self.within,
            "set_device": self.choose,
            "current_device": lambda: self.devices[threading.current_thread().name],
            "is_initialized": lambda: True,
            "current_stream": self._current_stream,
            "get_device_properties": self._get_device_properties,
        }
        for name, function in instead.items():
            spec = mock.create_autospec(getattr(torch.cuda, name), side_effect=function)
            monkeypatch.setattr(torch.cuda, name, spec)
        monkeypatch.setattr(torch.cuda, "device", self._on)

    def choose(self, device: Any) -> None:
        """As ``cudaSetDevice``, which makes a context."""
        number = getattr(device, "index", device)
        self.devices[threading.current_thread().name] = number
        self.contexts.add(number)

    @contextmanager
    def _on(self, device: Any) -> Iterator[None]:
        """It goes back to a device that has a context, or else when that is used."""
        thread = threading.current_thread().name
        before = self.devices[thread]
        self.choose(device)
        yield
        self.devices[thread] = before

    def _stream(self, *arguments: Any, **options: Any) -> str:
        self.made.append(DriverStream(self, f"stream {len(self.made)}"))
        self._of[self.made[-1]] = arguments[0].index
        self.asked.append(("stream", *arguments, *options.items()))
        return self.made[-1]

    def _event(self, **options: Any) -> Any:
        self.asked.append(("event", *options.items()))
        return SimpleNamespace(record=lambda stream: self.asked.append(("record", stream)))

    @contextmanager
    def within(self, stream: Any) -> Iterator[Any]:
        """It makes the stream's device current, and then the one that was so before."""
        device = self.devices[threading.current_thread().name]
        before, self.current = self.current, stream
        self.choose(self._of[stream])
        yield stream
        self.choose(device)
        self.current = before

    def _current_stream(self, device: Any = None) -> Any:
        return SimpleNamespace(wait_event=lambda event: self.asked.append(("wait", self.current, event)))

    def _get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(uuid="0a-1b")


class DriverStream(str):
    """A stream by its name, current within itself."""

    _driver: Driver

    def __new__(cls, driver: Driver, name: str) -> DriverStream:
        stream = super().__new__(cls, name)
        stream._driver = driver
        return stream

    def __enter__(self) -> None:
        self._context = self._driver.within(self)
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


class Tensor:
    """A tensor that says on which stream it was brought to the host."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def cpu(self) -> torch.Tensor:
        self._driver.asked.append(("cpu", self._driver.current))
        return torch.ones(2)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def test_nobody_makes_a_context_on_a_device_that_is_not_used(driver: Driver) -> None:
    """A thread's current device is the first one at the beginning, whatever the rank."""
    tensor: Any = Tensor(driver)
    device = Accelerator(torch.device("cuda", 1))
    stream: Any = device.stream()
    for use in (device.running, device.working):
        with use(stream):
            assert driver.current == stream and torch.cuda.current_device() == 1
    device.fetch(tensor, MADE)
    assert driver.contexts == {1} and torch.cuda.current_device() == 0


def test_a_thread_begins_with_the_device_of_who_starts_it(driver: Driver) -> None:
    torch.cuda.set_device(2)
    thread = threading.Thread(target=accelerator.enter_same(), name="another")
    thread.start()
    thread.join()
    assert driver.devices["another"] == 2


def test_who_waits_for_an_event_leaves_the_core_to_others(driver: Driver) -> None:
    Accelerator(torch.device("cuda", 0)).event()
    assert ("event", ("enable_timing", False), ("blocking", True)) in driver.asked


class OfTorch:
    """What CuPy and this project ask of a stream of PyTorch's."""

    cuda_stream, device_index = 0x1234, 0

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream


def test_cupy_takes_a_stream_of_pytorch_and_does_not_complain() -> None:
    """CuPy 14 warns of its ``ExternalStream``: where warnings are errors every micro-batch would fail."""
    cupy = pytest.importorskip("cupy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_torch: Any = OfTorch()
        stream: Any = accelerator._for_cupy(cupy.cuda, of_torch)
    assert stream.ptr == OfTorch.cuda_stream


@pytest.mark.gpu
def test_a_part_lasts_from_the_end_of_the_one_before_whenever_it_was_issued() -> None:
    device = Accelerator(torch.device("cuda"))
    with device.running(device.stream()):
        torch.cuda._sleep(_CYCLES)  # the host is far ahead from here on
        marks = []
        for factor in (1, 4, 2):
            marks.append(device.event(timed=True))
            torch.cuda._sleep(factor * _CYCLES)
            marks.append(device.event(timed=True))
        marks[-1].synchronize()
        spans = zip(marks[::2], marks[1::2], strict=True)
        one, four, two = (device.seconds(begin, end) for begin, end in spans)
    assert 0 < one < two < four, "each for itself, although all were issued at once"


# --- NVML ------------------------------------------------------------------------------------------------------


class _Error(Exception):
    pass


class _Library:
    """A module ``pynvml``. ``fails``: the function that raises; ``kind``: of the device, as its UUID begins."""

    NVMLError = _Error

    def __init__(self, fails: str = "", kind: str = "GPU-") -> None:
        self.fails = fails
        self.kind = kind
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name == self.fails:
                raise _Error(name)
            self.open += {"nvmlInit": 1, "nvmlShutdown": -1}.get(name, 0)
            if name == "nvmlDeviceGetHandleByUUID":
                if not str(arguments[0]).startswith(self.kind):
                    raise _Error("not found")
                return arguments[0]
            return SimpleNamespace(gpu=37, used=3 << 30, total=80 << 30)

        return call


@pytest.mark.parametrize(
    ("library", "utilisation"),
    [(_Library(), 0.37), (_Library("nvmlDeviceGetUtilizationRates", "MIG-"), None)],
    ids=["a GPU", "a part of one"],
)
def test_figures(monkeypatch: pytest.MonkeyPatch, library: _Library, utilisation: float | None) -> None:
    """NVML knows a part by "MIG-" and its UUID, and answers that its utilisation is not supported."""
    monkeypatch.setitem(sys.modules, "pynvml", library)
    expected = {"utilisation": utilisation, "memory_used_bytes": 3 << 30, "memory_total_bytes": 80 << 30}
    assert nvml.reading("1") == expected
    assert library.open == 0


@pytest.mark.parametrize("fails", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo", None])
def test_no_driver_no_such_device_no_permission_no_package(monkeypatch: pytest.MonkeyPatch, fails: str | None) -> None:
    library = None if fails is None else _Library(fails)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert nvml.reading("1") is None
    assert library is None or library.open == 0


@pytest.mark.gpu
def test_a_real_device() -> None:
    found = nvml.reading(Accelerator(torch.device("cuda")).uuid)
    assert found is not None
    used, total = found["memory_used_bytes"], found["memory_total_bytes"]
    assert used is not None and total is not None and used <= total
