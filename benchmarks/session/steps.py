"""What the consumer does with a batch: read it, or train torchvision's ResNet-50 on it; and how long that takes.

Decision: cuDNN's heuristics, not its benchmark mode, choose the algorithms: each process would choose for itself, and
a difference of 3 % between steps could be theirs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.session.settings import Settings

EMPTY, TRAINING = "empty", "resnet50"
_AHEAD = 2  # steps that the host may be ahead of the device


class Step(Protocol):
    """What is done with each batch, {"image": float32 [batch, 3, height, width], "label": int64 [batch]}."""

    name: str

    def __call__(self, batch: Mapping[str, Any]) -> None: ...


class Reading:
    """Reads every byte of the pictures, on their device."""

    name = EMPTY

    def __init__(self) -> None:
        self.sum: Tensor | None = None

    def __call__(self, batch: Mapping[str, Any]) -> None:
        self.sum = batch["image"].sum()


class Training:
    """A step of ResNet-50 by stochastic gradient descent: channels last, on a GPU in bfloat16 where that is safe."""

    name = TRAINING

    def __init__(self, settings: Settings) -> None:
        self._device = torch.device(settings.device)
        with self._device:
            model = _toy(settings.classes) if settings.quick else _resnet50(settings.classes)
        self.model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        self.loss: Tensor | None = None

    def __call__(self, batch: Mapping[str, Any]) -> None:
        images = batch["image"].to(memory_format=torch.channels_last)
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._device.type == "cuda"):
            loss = nn.functional.cross_entropy(self.model(images), batch["label"])
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()


def _resnet50(classes: int) -> nn.Module:
    network: nn.Module = importlib.import_module("torchvision.models").resnet50(num_classes=classes)
    return network


def _toy(classes: int) -> nn.Module:
    """A convolution, a batch normalisation and a linear layer, also where torchvision is not installed."""
    body = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))


def make(name: str, settings: Settings) -> Step:
    """The step of this name."""
    return Training(settings) if name == TRAINING else Reading()


def resident(settings: Settings) -> Iterator[dict[str, Tensor]]:
    """Batches that lie on the device already, the same few for ever."""
    generator = torch.Generator(settings.device).manual_seed(0)
    shape = (settings.batch, 3, settings.size, settings.size)
    batches = [
        {
            "image": torch.randn(shape, generator=generator, device=settings.device),
            "label": torch.randint(
                settings.classes, (settings.batch,), generator=generator, device=settings.device, dtype=torch.int64
            ),
        }
        for _ in range(2)
    ]
    while True:
        yield from batches


def synchronise(device: str) -> None:
    """Wait until the device is through with everything."""
    if device == "cuda":
        torch.cuda.synchronize()


class Stopwatch:
    """Times steps on the device, by CUDA events; on the CPU by the clock. Keeps the host at most two steps ahead."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._marks: list[tuple[Any, Any]] = []

    def __len__(self) -> int:
        return len(self._marks)

    def time(self, step: Step, batch: Mapping[str, Any]) -> None:
        """Take the step."""
        begin = self._mark()
        step(batch)
        self._marks.append((begin, self._mark()))
        if self._cuda and len(self._marks) > _AHEAD:
            self._marks[-1 - _AHEAD][1].synchronize()

    def seconds(self) -> list[float]:
        """Of each step; waits for the last."""
        if not self._cuda:
            return [end - begin for begin, end in self._marks]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in self._marks]

    def _mark(self) -> Any:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event
