"""The model that the demonstration trains: a convolutional network small enough for two CPU cores."""

from __future__ import annotations

from torch import Tensor, nn

_CHANNELS = (32, 64, 128, 128)


class SmallNet(nn.Module):
    """Four convolutions of stride 2, the mean over all places, one linear layer.

    Takes float32 images [batch, 3, height, width] (any size from 16 pixels), gives logits [batch, classes].
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in zip((3, *_CHANNELS), _CHANNELS, strict=False):
            layers += [
                nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            ]
        self.features = nn.Sequential(*layers)
        self.classify = nn.Linear(_CHANNELS[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.features(images).mean(dim=(2, 3)))
        return logits
