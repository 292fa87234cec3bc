"""Does the order of delivery change what a model learns? The same training with each loader, over several seeds.

A small network learns the demonstration's photographs, a fifth of which is kept for testing, for a fixed number of
epochs with PyTorch's loader, with this one in order, and with this one bounded (out of order, at most eight batches
late). All draw the same kind of random crops; seeds decide order, crops and initial weights. Reported: the accuracy at
the end, by loader and seed, its difference to PyTorch's with the 95 % interval, and whether slow samples are spread
over the batches as chance would have it: the number of slow ones in each batch against the hypergeometric distribution
(chi-squared test), and the mean share in the first and second half of an epoch. A sample is slow when it belongs to the
costliest tenth, by the pixels of its file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import default_collate

from benchmarks import report
from benchmarks.compare.workloads import INDEX, Indexed, Prepared, with_index
from minato_gpu import DataLoader
from minato_gpu.extras import from_extra
from minato_gpu.lab.demo.model import SmallNet
from minato_gpu.lab.demo.photographs import make
from pipelines import image_classification

with from_extra("bench"):
    import cv2
    import scipy

LOADERS = ("pytorch", "minato_gpu in order", "minato_gpu bounded")
_BATCH, _CROP, _WORKERS = 32, 64, 2
_SLOW_SHARE = 0.1
_TEST_SHARE = 0.2


class _Part:
    """Some samples of a data set, numbered from 0."""

    def __init__(self, dataset: Any, indices: Any) -> None:
        self.dataset = dataset
        self.indices = [int(index) for index in indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]


@dataclass(frozen=True)
class Trained:
    """The accuracy on the photographs kept back, and how many slow samples each batch held, by epoch."""

    accuracy: float
    slow_counts: list[list[int]]


def train(loader: str, train_set: Any, test_set: Any, slow: Any, seed: int, epochs: int, classes: int) -> Trained:
    """Train once. ``slow``: bool (samples,), which of the training samples are slow."""
    torch.manual_seed(seed)
    model = SmallNet(classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    counts: list[list[int]] = []
    for batches in _epochs(loader, train_set, seed, epochs):
        counts.append([])
        model.train()
        for batch in batches:
            counts[-1].append(int(slow[np.asarray(batch[INDEX])].sum()))
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(batch["image"]), batch["label"]).backward()
            optimizer.step()
    return Trained(_accuracy(model, test_set), counts)


def _epochs(loader: str, train_set: Any, seed: int, epochs: int) -> Iterator[Any]:
    pipeline = with_index(image_classification.build(size=_CROP))
    order = torch.Generator().manual_seed(seed)
    common: dict[str, Any] = {"batch_size": _BATCH, "shuffle": True, "num_workers": _WORKERS, "generator": order}
    if loader == "pytorch":
        for epoch in range(epochs):
            dataset: Any = Prepared(Indexed(train_set), pipeline, seed=1000 * seed + epoch)
            yield TorchLoader(dataset, **common)
        return
    source: Any = Indexed(train_set)
    ours: Any = DataLoader(
        source,
        pipeline=pipeline,
        lanes=("cpu",),
        persistent_workers=True,
        in_order=loader.endswith("in order"),
        **common,
    )
    for _ in range(epochs):
        yield ours


def _accuracy(model: nn.Module, test_set: Any) -> float:
    """The share of the photographs kept back that the model names right, each cropped the same way every time."""
    prepared: Any = Prepared(Indexed(test_set), with_index(image_classification.build(size=_CROP)), seed=0)
    model.eval()
    right = 0
    with torch.no_grad():
        for first in range(0, len(prepared), _BATCH):
            batch = default_collate([prepared[at] for at in range(first, min(first + _BATCH, len(prepared)))])
            right += int((model(batch["image"]).argmax(dim=1) == batch["label"]).sum())
    return right / len(prepared)


def chance(counts: list[list[int]], slow: Any) -> dict[str, Any]:
    """How the slow samples were spread: ``p_value`` of the batches' counts under chance, and the shares by half.

    ``batches_by_slow_samples``: how many full batches held 0, 1, 2 and so on; ``expected_by_slow_samples``: by chance.

    ``p_value`` is None where there are too few batches to tell.
    """
    full = [count for epoch in counts for count in epoch[:-1]]  # the last batch may be smaller
    law = scipy.stats.hypergeom(len(slow), int(slow.sum()), _BATCH)
    edges = _classes(law, len(full))
    found = np.array([sum(lo <= count < hi for count in full) for lo, hi in edges])
    wanted = np.array([law.cdf(hi - 1) - law.cdf(lo - 1) for lo, hi in edges]) * len(full)
    wanted *= found.sum() / wanted.sum()
    most = max(full)
    halves = np.array([[np.mean(e[: len(e) // 2]), np.mean(e[len(e) // 2 : -1])] for e in counts]) / _BATCH
    return {
        "p_value": float(scipy.stats.chisquare(found, wanted).pvalue) if len(edges) > 1 else None,
        "slow_share_first_half": float(halves[:, 0].mean()),
        "slow_share_second_half": float(halves[:, 1].mean()),
        "slow_share": float(slow.mean()),
        "batches_by_slow_samples": np.bincount(full, minlength=most + 1).tolist(),
        "expected_by_slow_samples": (law.pmf(np.arange(most + 1)) * len(full)).tolist(),
    }


def _classes(law: Any, batches: int) -> list[tuple[int, int]]:
    """Ranges of counts that chance makes at least five batches have each, as the test needs."""
    edges, low = [], 0
    for count in range(_BATCH + 1):
        if batches * (law.cdf(count) - law.cdf(low - 1)) >= 5 and batches * law.sf(count) >= 5:
            edges.append((low, count + 1))
            low = count + 1
    return [*edges, (low, _BATCH + 1)]


def _pixels(path: str) -> int:
    picture = cv2.imread(path, cv2.IMREAD_REDUCED_GRAYSCALE_8)
    assert picture is not None
    return int(picture.size)


@click.command(help=__doc__)
@report.command
@click.option("--seeds", type=click.IntRange(min=2), default=5, show_default=True)
@click.option("--epochs", type=click.IntRange(min=1), default=4, show_default=True)
def main(json_path: str | None, quick: bool, repetitions: int | None, seeds: int, epochs: int) -> None:
    seeds, epochs, photographs = (2, 1, 150) if quick else (repetitions or seeds, epochs, 1500)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "photographs"
        make(data, photographs, seed=0)
        dataset = image_classification.ImageFolder(data)
        order = np.random.default_rng(0).permutation(len(dataset))
        kept = int(_TEST_SHARE * len(order))
        test_set, train_set = _Part(dataset, order[:kept]), _Part(dataset, order[kept:])
        pixels = np.array([_pixels(dataset.paths[index]) for index in train_set.indices])
        slow = pixels >= np.quantile(pixels, 1 - _SLOW_SHARE)
        trained: dict[str, list[Trained]] = {loader: [] for loader in LOADERS}
        for seed in range(seeds):
            for loader in LOADERS:
                one = train(loader, train_set, test_set, slow, seed, epochs, len(dataset.classes))
                trained[loader].append(one)
                report.progress(f"seed {seed}, {loader}: accuracy {one.accuracy:.3f}")
        rows = [_row(loader, runs, trained[LOADERS[0]], slow) for loader, runs in trained.items()]
    settings = {"seeds": seeds, "epochs": epochs, "photographs": photographs, "batch_size": _BATCH, "quick": quick}
    columns = (
        "loader",
        "accuracy",
        "accuracy_min",
        "accuracy_max",
        "to_pytorch",
        "to_pytorch_low",
        "to_pytorch_high",
        "slow_share",
        "slow_share_first_half",
        "slow_share_second_half",
        "p_value",
    )
    report.publish(report.document("accuracy", settings, rows), json_path, columns)


def _row(loader: str, runs: list[Trained], reference: list[Trained], slow: Any) -> dict[str, Any]:
    accuracies = [one.accuracy for one in runs]
    row: dict[str, Any] = {"loader": loader, "repetitions": len(runs), "accuracies": accuracies}
    row |= report.summarise("accuracy", accuracies)
    if loader != LOADERS[0]:
        row |= difference(accuracies, [one.accuracy for one in reference])
    return row | chance([epoch for one in runs for epoch in one.slow_counts], slow)


def difference(accuracies: list[float], reference: list[float]) -> dict[str, float]:
    """The mean difference to PyTorch's loader, seed by seed, with its 95 % interval (Student's t)."""
    each = np.array(accuracies) - np.array(reference)
    half = float(scipy.stats.t.ppf(0.975, len(each) - 1) * scipy.stats.sem(each))
    mean = float(each.mean())
    return {"to_pytorch": mean, "to_pytorch_low": mean - half, "to_pytorch_high": mean + half}


if __name__ == "__main__":
    main()
