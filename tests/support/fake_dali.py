"""DALI on a fake device: its graphs compute late, on a stream of their own, from inputs that they were only shown, into
memory of a pool that is used again as soon as it has been let go of.

``operators``: what a graph says of its operators; ``runs``: for each run, how much work its stream had not done then;
``held``: what held the interpreter lock, and for how many bytes; ``gone``: inputs that were not there any more when
they were read; ``released``: the threads that let go of outputs.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.fake_device import CANARY, FakeDevice
from tests.support.fake_work import Copy

Inputs = Mapping[str, Any]


class Node:
    """What an operator makes of one sample's inputs."""

    def __init__(self, compute: Callable[[Inputs], Any]) -> None:
        self.compute = compute

    def gpu(self) -> Node:
        """There."""
        return self

    def __add__(self, other: Node) -> Node:
        return Node(lambda inputs: self.compute(inputs) + other.compute(inputs))


class TensorList:
    """An output: the memory of all samples, one after another."""

    def __init__(self, dali: FakeDali, arrays: list[Any]) -> None:
        self.dtype = arrays[0].dtype
        self._dali = dali
        self._shapes = [array.shape for array in arrays]
        self.memory = np.full(sum(array.nbytes for array in arrays), CANARY, np.uint8)
        weakref.finalize(self, dali.let_go, self.memory)

    def shape(self) -> list[tuple[int, ...]]:
        """Of each sample."""
        return self._shapes

    def copy_to_external(self, into: ctypes.c_void_p, stream: ctypes.c_void_p, *, non_blocking: bool) -> None:
        """As DALI's."""
        assert non_blocking and into.value and stream.value
        target = np.ctypeslib.as_array((ctypes.c_uint8 * self.memory.nbytes).from_address(into.value))
        device = self._dali.device
        copy = Copy([torch.from_numpy(target)], [torch.from_numpy(self.memory)])
        device.issue(copy, device.known_as(stream.value))


class Pipeline:
    """As DALI's, of one output."""

    def __init__(self, dali: FakeDali, **_: Any) -> None:
        self._dali = dali
        self._fed: dict[str, list[Callable[[], Any]]] = {}
        self._scheduled: list[dict[str, list[Callable[[], Any]]]] = []

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set_outputs(self, node: Node) -> None:
        """As DALI's."""
        self._node = node

    def build(self) -> None:
        """As DALI's, which holds the lock."""
        self._dali.held.append(("build", 0))
        self._stream = self._dali.device.stream()

    def serialize(self) -> bytes:
        """Its operators' names."""
        if self._dali.operators is None:
            raise RuntimeError("Could not serialize the operator")
        return self._dali.operators

    def input_feed_count(self, name: str) -> int:
        """Every input is one."""
        return 1

    def feed_input(self, name: str, values: list[Any]) -> None:
        """Either shown, or copied under the lock."""
        if self._dali.sources[name].get("no_copy"):
            self._fed[name] = [self._shown(value) for value in values]
        else:
            self._dali.held.append(("feed", sum(value.nbytes for value in values)))
            self._fed[name] = [np.array(value).copy for value in values]

    def _shown(self, value: Any) -> Callable[[], Any]:
        ref, like = weakref.ref(value), np.empty_like(value)

        def read() -> Any:
            found = ref()
            if found is None:
                self._dali.gone += 1
            return like if found is None else found

        return read

    def schedule_run(self) -> None:
        """As DALI's."""
        self._scheduled.append(dict(self._fed))

    def outputs(self, stream: Any) -> list[TensorList]:
        """Of the oldest run. What is made is ready on ``stream``, some time."""
        self._dali.runs.append(stream.issued - stream.done)
        fed = self._scheduled.pop(0)
        if self._dali.fails:
            raise RuntimeError(self._dali.fails.pop(0))
        node, device = self._node, self._dali.device
        count = len(next(iter(fed.values())))

        def compute() -> list[Any]:
            return [node.compute({name: read[n]() for name, read in fed.items()}) for n in range(count)]

        output = TensorList(self._dali, compute())
        memory = output.memory

        def work() -> None:
            memory[:] = np.concatenate([array.reshape(-1).view(np.uint8) for array in compute()])

        device.issue(work, self._stream)
        with device.running(self._stream):
            event = device.event()
        with device.running(stream):
            device.wait(event)
        return [output]


class FakeDali:
    """The modules nvidia.dali, nvidia.dali.fn, .types and .tensors. ``fails``: errors of the next runs."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.held: list[tuple[str, int]] = []
        self.released: list[str] = []
        self.fails: list[str] = []
        self.gone = 0
        self.operators: bytes | None = b""
        self.runs: list[int] = []
        self.sources: dict[str, dict[str, Any]] = {}
        self.fn = SimpleNamespace(external_source=self._external_source)
        self.types = SimpleNamespace(to_numpy_type=lambda dtype: dtype)
        self.tensors = SimpleNamespace(
            TensorCPU=lambda array: array, TensorListCPU=lambda arrays, *_: [np.asarray(array) for array in arrays]
        )

    def Pipeline(self, **options: Any) -> Pipeline:
        """As DALI's class."""
        return Pipeline(self, **options)

    def _external_source(self, *, name: str, **options: Any) -> Node:
        self.sources[name] = options
        return Node(lambda inputs: inputs[name])

    def let_go(self, memory: Any) -> None:
        """The pool has it again, and gives it to somebody else."""
        self.released.append(threading.current_thread().name)
        memory[:] = CANARY

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Instead of the library; and what PyTorch takes of a GPU's memory is the fake device's."""
        for name, module in (("", self), (".fn", self.fn), (".types", self.types), (".tensors", self.tensors)):
            monkeypatch.setitem(sys.modules, f"nvidia.dali{name}", module)
        empty = torch.empty

        def on_device(*size: int, device: Any = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            if device is None:
                return empty(*size, dtype=dtype)
            nbytes = int(np.prod(size)) * dtype.itemsize
            return self.device.empty(nbytes).view(dtype).view(*size)

        monkeypatch.setattr(torch, "empty", on_device)
