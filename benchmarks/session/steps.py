"""What the consumer does with a batch: nothing but read it, or train ResNet-50 on it; and how long that takes.

Decision: cuDNN's heuristics, not its benchmark mode, choose the algorithms: each process would choose for itself, and
a difference of 3 % between steps could be theirs.

The network is that of He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", 2015, table 1. One
deviation, which everybody trains with today: a stage's stride is in its first 3x3 convolution, not in the 1x1 before
it. 25,557,032 parameters with 1000 classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.session.settings import Settings

EMPTY, TRAINING = "empty", "resnet50"
_AHEAD = 2  # steps that the host may be ahead of the device


class Step(Protocol):
    """What is done with each batch, {"image": float32 [batch, 3, height, width], "label": int64 [batch]}."""

    def __call__(self, batch: Mapping[str, Any]) -> None: ...


class Reading:
    """Reads every byte of the pictures, on their device."""

    def __init__(self) -> None:
        self.sum: Tensor | None = None

    def __call__(self, batch: Mapping[str, Any]) -> None:
        self.sum = batch["image"].sum()


class Training:
    """A step of ResNet-50 by stochastic gradient descent: channels last, on a GPU in bfloat16 where that is safe."""

    def __init__(self, settings: Settings) -> None:
        self._device = torch.device(settings.device)
        small: dict[str, Any] = {"blocks": (1, 1, 1, 1), "width": 4} if settings.quick else {}
        with self._device:
            self.model = ResNet(settings.classes, **small).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
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


# --- ResNet-50 --------------------------------------------------------------------------------------------------------


_WIDER = 4  # a block's output has so many times the channels of its 3x3 convolution


class ResNet(nn.Module):
    """Bottleneck blocks in four stages; ``blocks``: how many in each, ``width``: channels of the first.

    Takes images [batch, 3, height, width], gives logits [batch, classes].
    """

    def __init__(self, classes: int, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _convolution(3, width, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)
        )
        stages, channels = [], width
        for number, count in enumerate(blocks):
            inner = width * 2**number
            for block in range(count):
                stages.append(Bottleneck(channels, inner, stride=2 if number and not block else 1))
                channels = inner * _WIDER
        self.stages = nn.Sequential(*stages)
        self.classify = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.stages(self.stem(images)).mean(dim=(2, 3)))
        return logits


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut, which is projected where shapes differ."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        out = inner * _WIDER
        self.residual = nn.Sequential(
            _convolution(channels, inner, 1),
            nn.ReLU(inplace=True),
            _convolution(inner, inner, 3, stride),
            nn.ReLU(inplace=True),
            _convolution(inner, out, 1),
        )
        same = channels == out and stride == 1
        self.shortcut: nn.Module = nn.Identity() if same else _convolution(channels, out, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu_(self.residual(images) + self.shortcut(images))


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Module:
    """A convolution and its batch normalisation."""
    convolution = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))
