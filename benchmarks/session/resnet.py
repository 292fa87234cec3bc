"""ResNet-50 (He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", 2015, table 1), written plainly.

One deviation, which everybody trains with today: a stage's stride is in its first 3x3 convolution, not in the 1x1
before it. 25,557,032 parameters with 1000 classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

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
