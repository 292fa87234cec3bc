"""The demonstration's training loop: an ordinary PyTorch loop, with what the loader did written down.

Everything that the summary says about samples is counted here, on the consumer's side, from the batches
themselves; what the loader says about its lanes comes from ``DataLoader.stats()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from minato_gpu import DataLoader
from minato_gpu.arguments import LaneName
from minato_gpu.pipelines import image_classification
from minato_gpu.samples import JSON, Value
from minato_gpu.util.threads import usable_cores

LANES: tuple[LaneName, ...] = ("cpu", "device")
_CHANNELS = (32, 64, 128, 128)
_CROP = 96  # pixels, of a side
_LEARNING_RATE = 2e-3


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


@dataclass(slots=True)
class Tally:
    """The consumer's view of one epoch so far."""

    epoch: int
    expected: Tensor  # samples of each class in the data set: int64 [classes]
    came: Tensor  # of each class so far: int64 [classes]
    correct: int = 0
    loss_sum: float = 0.0
    elapsed_s: float = 0.0

    def add(self, labels: Tensor, logits: Tensor, loss: float) -> None:
        """Counts one batch: labels int64 [batch], logits [batch, classes], its mean loss."""
        self.correct += int((logits.argmax(dim=1) == labels).sum())
        self.loss_sum += loss * len(labels)
        self.came += torch.bincount(labels.cpu(), minlength=len(self.came))

    @property
    def samples(self) -> int:
        return int(self.came.sum())

    @property
    def complete(self) -> bool:
        """True if as many samples of every class came as the data set has."""
        return torch.equal(self.came, self.expected)

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples


def train(
    data: Path, *, epochs: int, batch_size: int, workers: int, seed: int, device: str | None
) -> Iterator[tuple[Tally, dict[str, JSON], dict[str, JSON]]]:
    """Trains on the class folders in ``data``; batches and the model are on ``device`` (None: the CPU).

    Yields each epoch's tally, and the loader's statistics and timeline of it. Raises whatever the data set, the
    pipeline or the loader raises.
    """
    dataset: Value = image_classification.ImageFolder(data)
    with _cores_for_the_lanes():
        torch.manual_seed(seed)
        model = SmallNet(len(dataset.classes)).to(device or "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
        loader = DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=True,
            num_workers=workers,
            persistent_workers=True,
            generator=torch.Generator().manual_seed(seed),
            pipeline=image_classification.build(size=_CROP),
            device=device,
            lanes=LANES,
            epochs=epochs,
        )
        counts = torch.bincount(torch.tensor(dataset.labels), minlength=len(dataset.classes))
        for epoch in range(epochs):
            tally = Tally(epoch, counts, torch.zeros_like(counts))
            _train_epoch(model, optimizer, loader, tally)
            yield tally, loader.stats(), loader.timeline()


def _train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], tally: Tally) -> None:
    model.train()
    started = perf_counter()
    for batch in loader:
        images, labels = batch["image"], batch["label"]
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        tally.add(labels, logits.detach(), loss.item())
        tally.elapsed_s = perf_counter() - started


@contextmanager
def _cores_for_the_lanes() -> Iterator[None]:
    """Leaves cores to the lanes while the model trains on the CPU: by default torch would take them all."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, usable_cores() // 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)
