"""What the GPU session measures with: the data, the transforms on the device, the model, its step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from benchmarks.compare.workloads import INDEX
from benchmarks.session import loaders, measure, steps, work
from benchmarks.session.settings import Settings
from benchmarks.session.steps import ResNet
from benchmarks.session.torch_gpu import Crops, finished, packed, resized
from benchmarks.work import ContentError
from pipelines import image_classification
from pipelines.photograph_stages import GEOMETRIC
from tests.support.waiting import wait_until


def settings(folder: Path) -> Settings:
    return Settings.usual("cpu", folder, quick=True)


# --- data --------------------------------------------------------------------------------------------------------


def test_each_round_has_every_photograph_once(photographs: Path) -> None:
    source = image_classification.dataset(photographs)
    selection = work.Selection(source, 2 * len(source) + 3, work.MIXED)
    rounds = np.split(selection.order, [len(source), 2 * len(source)])
    assert len(selection) == 2 * len(source) + 3
    assert sorted(rounds[0]) == sorted(rounds[1]) == list(range(len(source)))
    assert list(rounds[0]) != list(rounds[1])
    assert selection[5] == source[int(selection.order[5])]
    assert (selection.paths[5], selection.labels[5]) == (selection[5]["path"], selection[5]["label"])


def test_small_photographs_are_the_smallest_quarter(photographs: Path) -> None:
    source = image_classification.dataset(photographs)
    chosen = set(work.Selection(source, len(source), work.SMALL).order.tolist())
    sizes = [Path(path).stat().st_size for path in source.paths]
    others = set(range(len(source))) - chosen
    assert len(chosen) == len(source) // 4
    assert max(sizes[number] for number in chosen) <= min(sizes[number] for number in others)


@pytest.mark.parametrize(
    ("came", "ordered", "complaint"),
    [
        (list(range(40)), True, None),
        ([*range(1, 41), 0], True, None),
        ([0, 1, 2, 2], True, "more than once"),
        ([*range(3), *range(4, 60)], True, r"should have come: \[3\]"),
        ([*range(50), *range(51, 60)], True, None),  # may still come
    ],
)
def test_what_came_is_checked(came: list[int], ordered: bool, complaint: str | None) -> None:
    if complaint is None:
        work.check_delivery(np.array(came), 4, ordered=ordered)
    else:
        with pytest.raises(ContentError, match=complaint):
            work.check_delivery(np.array(came), 4, ordered=ordered)


@pytest.mark.parametrize("squares", [True, False])
@pytest.mark.parametrize("decoder", ["opencv", "nvimgcodec"])
def test_peers_prepare_the_samples_of_the_pipeline(photographs: Path, squares: bool, decoder: str) -> None:
    asked = work.job(settings(photographs), samples=16)
    crops = Crops(asked, decoder, squares=squares, size=32)
    batch = finished(packed([crops[number] for number in range(8)], squares=squares), 32)
    taken = work.Taken()
    taken.add(batch)
    peer = loaders.TorchGpu("pytorch", 1, 32)
    found = taken.check(asked, peer.tolerance(asked, "cpu"), ordered=True, own_draws=False)
    assert found.content_ok and found.max_levels is not None and found.max_levels <= GEOMETRIC.maximum
    wrong = work.Taken()
    wrong.add({**batch, "image": batch["image"].flip(3)})
    off = wrong.check(asked, peer.tolerance(asked, "cpu"), ordered=True, own_draws=False)
    assert off.content_ok is False and (off.mean_levels or 0.0) > GEOMETRIC.mean, "told, and no error"
    other = work.Taken()
    other.add({**batch, "label": batch["label"] + 1})
    with pytest.raises(ContentError, match="label of samples"):
        other.check(asked, peer.tolerance(asked, "cpu"), ordered=True, own_draws=False)


# --- transforms on the device ------------------------------------------------------------------------------------


def test_crops_are_resized_as_opencv_does_it() -> None:
    rng = np.random.default_rng(0)
    crops = [rng.integers(0, 256, (*shape, 3)).astype(np.uint8) for shape in ((1, 1), (5, 90), (64, 48), (32, 32))]
    mirror = [False, True, True, False]
    extent = torch.tensor([crop.shape[:2] for crop in crops])
    counts = extent.prod(1)
    pixels = torch.from_numpy(np.concatenate([crop.reshape(-1, 3) for crop in crops]))
    found = resized(pixels, counts.cumsum(0) - counts, extent, torch.tensor(mirror), 32).numpy()
    for crop, turned, image in zip(crops, mirror, found, strict=True):
        wanted = cv2.resize(crop, (32, 32), interpolation=cv2.INTER_LINEAR)
        wanted = wanted[:, ::-1] if turned else wanted
        assert np.abs(image - wanted.astype(np.float32)).max() <= 1


def test_squares_and_crops_of_that_size_end_the_same() -> None:
    rng = np.random.default_rng(1)
    samples: list[dict[str, Any]] = [
        {"pixels": rng.integers(0, 256, (32, 32, 3)).astype(np.uint8), "mirror": number % 2 == 1, "label": number}
        for number in range(70)  # more than are resized at once
    ]
    samples = [{**sample, INDEX: number} for number, sample in enumerate(samples)]
    square, crop = (finished(packed(samples, squares=squares), 32) for squares in (True, False))
    assert square["image"].shape == (70, 3, 32, 32) and square["image"].dtype == torch.float32
    torch.testing.assert_close(square["image"], crop["image"])
    assert square["label"].tolist() == crop[INDEX].tolist() == list(range(70))


# --- the step ----------------------------------------------------------------------------------------------------


def test_the_model_is_resnet_50() -> None:
    with torch.device("meta"):
        model = ResNet(1000)
        assert sum(weights.numel() for weights in model.parameters()) == 25_557_032
        features = model.stages(model.stem(torch.empty(2, 3, 224, 224)))
        assert features.shape == (2, 2048, 7, 7)
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


def test_the_most_memory_in_use_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([(90, 100), (60, 100), (20, 100)])
    last = (80, 100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: next(answers, last))
    with measure._watched(measure._used_bytes("cuda")) as peak:
        wait_until(lambda: peak[0] == 70)
    assert peak == [70]


def test_a_step_trains(photographs: Path) -> None:
    chosen = settings(photographs)
    torch.manual_seed(0)
    step = steps.Training(chosen)
    batch = next(steps.resident(chosen))
    watch = steps.Stopwatch("cpu")
    losses = []
    for _ in range(6):
        watch.time(step, batch)
        assert step.loss is not None
        losses.append(float(step.loss))
    assert losses[-1] < losses[0]
    assert len(watch) == len(watch.seconds()) == 6 and min(watch.seconds()) > 0
