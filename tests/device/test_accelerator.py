"""What is asked of CUDA, as far as that shows without one: by stand-ins made after PyTorch's own functions, so that a
wrong name or argument is found, and by CuPy's own classes, which need no device to be made."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from minato_gpu.device import accelerator, nvml
from minato_gpu.device.accelerator import Accelerator

pytestmark = pytest.mark.filterwarnings("error")

MADE: Any = "made"  # an event, by its name
_CYCLES = 1 << 23


class Driver:
    """Takes the place of what ``Accelerator`` asks ``torch.cuda``.

    ``contexts``: the devices on which memory was taken; ``device``: the current one, the first one at the beginning;
    ``current``: the stream.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contexts: set[int] = set()
        self.device = 0
        self.current: Any = None
        instead: dict[str, Callable[..., Any]] = {
            "Stream": lambda device, **_: DriverStream(self, device.index),
            "Event": lambda **_: SimpleNamespace(record=lambda stream: None),
            "stream": lambda stream: stream,
            "set_device": self.choose,
            "current_device": lambda: self.device,
            "is_initialized": lambda: True,
            "current_stream": lambda device=None: self.current,
            "get_device_properties": lambda device=None: SimpleNamespace(uuid="0a-1b"),
        }
        for name, function in instead.items():
            spec = mock.create_autospec(getattr(torch.cuda, name), side_effect=function)
            monkeypatch.setattr(torch.cuda, name, spec)
        monkeypatch.setattr(torch.cuda, "device", self._on)
        monkeypatch.setattr(torch.cuda.nvtx, "range", lambda message: nullcontext())

    def choose(self, device: Any) -> None:
        """As ``cudaSetDevice``, which makes a context."""
        self.device = getattr(device, "index", device)
        self.contexts.add(self.device)

    @contextmanager
    def _on(self, device: Any) -> Iterator[None]:
        """It goes back to a device that has a context, or else when that is used."""
        before = self.device
        self.choose(device)
        yield
        self.device = before


class DriverStream:
    """A stream, current within itself; so is its device, and then the one that was so before."""

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver, self._device = driver, device

    def __enter__(self) -> None:
        self._before = self._driver.current, self._driver.device
        self._driver.current = self
        self._driver.choose(self._device)

    def __exit__(self, *error: Any) -> None:
        self._driver.current, device = self._before
        self._driver.choose(device)

    def wait_event(self, event: Any) -> None:
        """Nothing is waited for."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def test_nobody_makes_a_context_on_a_device_that_is_not_used(driver: Driver) -> None:
    """A thread's current device is the first one at the beginning, whatever the rank."""
    tensor: Any = SimpleNamespace(cpu=lambda: torch.ones(2))
    device = Accelerator(torch.device("cuda", 1))
    stream: Any = device.stream()
    for use in (device.running, device.working):
        with use(stream):
            assert driver.current is stream and driver.device == 1
    device.fetch(tensor, MADE)
    assert driver.contexts == {1} and driver.device == 0


def test_a_thread_begins_with_the_device_of_who_starts_it(driver: Driver) -> None:
    driver.device = 2
    begin = accelerator.enter_same()
    driver.device = 0  # as in a new thread
    begin()
    assert driver.device == 2


def test_who_waits_for_an_event_leaves_the_core_to_others(driver: Driver) -> None:
    device, made = Accelerator(torch.device("cuda", 0)), cast(mock.Mock, torch.cuda.Event)
    with device.running(device.stream()):
        device.event()
    assert made.call_args.kwargs == {"enable_timing": False, "blocking": True}


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
        spans = [device.seconds(begin, end) for begin, end in zip(marks[::2], marks[1::2], strict=True)]
        whole = device.seconds(marks[0], marks[-1])
    assert all(span > factor * _CYCLES / 4e9 for span, factor in zip(spans, (1, 4, 2), strict=True)), "of 4 GHz at most"
    assert sum(spans) <= 1.01 * whole, "each for itself, although all were issued at once"


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


FIGURES: dict[str, Any] = {"utilisation": 0.37, "memory_used_bytes": 3 << 30, "memory_total_bytes": 80 << 30}


@pytest.mark.parametrize(
    ("library", "figures"),
    [
        (_Library(), FIGURES),
        (_Library("nvmlDeviceGetUtilizationRates", "MIG-"), {**FIGURES, "utilisation": None}),
        (None, None),
        *((_Library(name), None) for name in ("nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo")),
    ],
    ids=["a GPU", "a part of one", "no package", "no driver", "no such device", "no permission"],
)
def test_figures(monkeypatch: pytest.MonkeyPatch, library: _Library | None, figures: Any) -> None:
    """NVML knows a part by "MIG-" and its UUID, and answers that its utilisation is not supported."""
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert nvml.reading("1") == figures
    assert library is None or library.open == 0


@pytest.mark.gpu
def test_a_real_device() -> None:
    found = nvml.reading(Accelerator(torch.device("cuda")).uuid)
    assert found is not None
    used, total = found["memory_used_bytes"], found["memory_total_bytes"]
    assert used is not None and total is not None and used <= total
