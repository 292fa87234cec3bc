"""What the GPU session measures with: the data, and peers as far as they can be tried without a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from benchmarks.compare.workloads import INDEX
from benchmarks.session import loaders, work
from benchmarks.session.dali import Dali, DaliDynamic
from benchmarks.session.loaders import Crops, Files, decoded, finished, joined
from benchmarks.session.settings import Settings
from benchmarks.work import ContentError
from minato_gpu.pipeline.stages import Tolerance
from pipelines import image_classification
from pipelines.image_classification import MEAN, STD
from pipelines.photograph_stages import GEOMETRIC


def settings(folder: Path) -> Settings:
    return Settings.usual("cpu", folder, quick=True)


# --- data --------------------------------------------------------------------------------------------------------


def test_each_round_has_every_photograph_once(photographs: Path) -> None:
    source = image_classification.dataset(photographs)
    selection = work.Rounds(source, 2 * len(source) + 3)
    rounds = np.split(selection.order, [len(source), 2 * len(source)])
    assert len(selection) == 2 * len(source) + 3
    assert sorted(rounds[0]) == sorted(rounds[1]) == list(range(len(source)))
    assert list(rounds[0]) != list(rounds[1])
    assert selection[5] == source[int(selection.order[5])]
    assert (selection.paths[5], selection.labels[5]) == (selection[5]["path"], selection[5]["label"])


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


def test_peers_prepare_the_samples_of_the_pipeline(photographs: Path) -> None:
    asked = work.job(settings(photographs), samples=16)
    crops = Crops(asked, 32)
    batch = finished(default_collate([crops[number] for number in range(8)]))
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


# --- peers: DALI's ways and torchvision ---------------------------------------------------------------------------

DALI = [Dali("dali", 2), DaliDynamic("dali_dynamic", 2)]


@pytest.mark.parametrize("peer", DALI, ids=lambda peer: peer.name)
def test_dali_delivers_each_sample_once_finished(photographs: Path, peer: Dali) -> None:
    pytest.importorskip("nvidia.dali")
    asked = work.job(settings(photographs), samples=32)
    batches = list(peer.make(asked, "cpu"))
    assert [batch[INDEX].tolist() for batch in batches] == [list(range(first, first + 4)) for first in range(0, 32, 4)]
    labels = asked.source.dataset.labels
    assert all(batch["label"].tolist() == [labels[number] for number in batch[INDEX]] for batch in batches)
    assert all(batch["image"].shape == (4, 3, 32, 32) and batch["image"].dtype == torch.float32 for batch in batches)
    levels = torch.cat([batch["image"] for batch in batches]).movedim(1, 3) * torch.tensor(STD) + torch.tensor(MEAN)
    assert -0.001 < levels.min() < 0.05 and 0.95 < levels.max() < 1.001
    assert not torch.equal(batches[0]["image"], batches[1]["image"])


def test_dali_accepts_the_graph_for_a_gpu(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dali = pytest.importorskip("nvidia.dali")
    monkeypatch.setenv("MINATO_HW_DECODER_LOAD", "0.5")
    monkeypatch.setattr(dali.Pipeline, "build", lambda self: None)  # the rest needs the GPU
    graph = Dali("dali", 2)._graph(work.job(settings(photographs), samples=16), "cuda")
    graph._build_graph()  # names and types of all arguments are checked
    made_on = {each.name.strip("_").rstrip("_0123456789"): each.outputs[0].device for each in graph._ops}
    made_on.pop("Copy", None)  # of what the CPU made
    on_gpu = ("Image", "RandomResizedCrop", "CropMirrorNormalize")
    assert made_on == {"reader": "cpu", "CoinFlip": "cpu", **dict.fromkeys(on_gpu, "gpu")}


@pytest.fixture
def torchvision() -> None:
    """Skips without a torchvision that decodes: one built for another torch is imported, and does not."""
    black = torch.from_numpy(cv2.imencode(".jpg", torch.zeros(8, 8, 3, dtype=torch.uint8).numpy())[1])
    try:
        importlib.import_module("torchvision.io").decode_jpeg(black)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torchvision cannot decode: {error}")


@pytest.mark.usefixtures("torchvision")
def test_torchvision_prepares_the_samples_of_the_pipeline(photographs: Path) -> None:
    """All of them: those of other formats and orientations too, which its nvJPEG cannot do."""
    asked = work.job(settings(photographs), samples=len(image_classification.dataset(photographs)))
    files = Files(asked)
    plain = [files[number]["plain"] for number in range(len(files))]
    assert any(plain) and not all(plain)
    rounded = Tolerance(2, 0.5)  # its own decoder, and a resized picture of whole levels
    for first in range(0, len(files), 8):
        numbers = range(first, min(first + 8, len(files)))
        batch = decoded(joined([files[number] for number in numbers]), 32)
        assert batch["image"].shape == (len(numbers), 3, 32, 32)
        taken = work.Taken()
        taken.add(batch)
        assert taken.check(asked, rounded, ordered=False, own_draws=False).content_ok
