"""What the GPU session measures with: the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import default_collate

from benchmarks.session import loaders, work
from benchmarks.session.loaders import Crops, finished
from benchmarks.session.settings import Settings
from benchmarks.work import ContentError
from pipelines import image_classification
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
