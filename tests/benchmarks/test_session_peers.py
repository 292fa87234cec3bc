"""The peers of the GPU session: DALI's ways and torchvision, as far as they can be tried without a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path

import cv2
import pytest
import torch

from benchmarks.compare.workloads import INDEX
from benchmarks.session import work
from benchmarks.session.dali import Dali, DaliDynamic
from benchmarks.session.loaders import Files, decoded, joined
from benchmarks.session.settings import Settings
from minato_gpu.pipeline.stages import Tolerance
from pipelines import image_classification
from pipelines.image_classification import MEAN, STD


def settings(folder: Path) -> Settings:
    return Settings.usual("cpu", folder, quick=True)


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
    wrong = work.Taken()
    wrong.add({**batch, "image": batch["image"].flip(3)})
    assert not wrong.check(asked, rounded, ordered=False, own_draws=False).content_ok
