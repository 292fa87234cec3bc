"""A real Lightning Trainer saves the loader's state with its own, in the middle of an epoch, and goes on from there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from minato_gpu import DataLoader
from tests.contracts.datasets import Made, draw, rows
from tests.contracts.modes import BOUNDED_8, IN_ORDER, Mode

SAMPLES, BATCH = 36, 4
BATCHES = SAMPLES // BATCH

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
]


def saving_trainer(folder: Path, steps: int) -> Any:
    from pytorch_lightning import Trainer
    from pytorch_lightning.callbacks import ModelCheckpoint

    return Trainer(
        accelerator="cpu",
        max_epochs=3,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)],
    )


def recording_model() -> Any:
    from pytorch_lightning import LightningModule

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[tuple[int, list[Any]]] = []

        def training_step(self, batch: Any, number: int) -> Any:
            self.seen.append((self.current_epoch, rows([batch])))
            return self.layer(batch[1][:, None].float()).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3)

    return Model()


def _loader(mode: Mode) -> DataLoader[Any]:
    loader: DataLoader[Any] = mode.loader(
        Made(SAMPLES, draw), BATCH, num_workers=2, shuffle=True, generator=torch.Generator().manual_seed(5)
    )
    return loader


@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8], ids=lambda mode: mode.name)
def test_a_checkpoint_in_the_middle_of_an_epoch(mode: Mode, tmp_path: Path) -> None:
    """Every sample exactly once in each epoch over both runs, with the content of a run that nobody interrupted."""
    whole, first, second = recording_model(), recording_model(), recording_model()
    saving_trainer(tmp_path / "whole", 2 * BATCHES).fit(whole, _loader(mode))
    stopped_at = BATCHES + 5
    saving_trainer(tmp_path / "cut", stopped_at).fit(first, _loader(mode))
    loader = _loader(mode)
    checkpoint = str(tmp_path / f"cut/step={stopped_at}.ckpt")
    saving_trainer(tmp_path / "cut", 2 * BATCHES).fit(second, loader, ckpt_path=checkpoint)
    assert (len(first.seen), len(second.seen)) == (stopped_at, 2 * BATCHES - stopped_at)
    assert loader.stats()["batches_delivered"] == len(second.seen)
    seen = [*first.seen, *second.seen]
    assert [epoch for epoch, _ in seen] == [0] * BATCHES + [1] * BATCHES
    if not mode.lateness:
        assert seen == whole.seen
    for number in range(2):
        got, wanted = ([s for epoch, b in run for s in b if epoch == number] for run in (seen, whole.seen))
        assert Counter(sample[0] for sample in got) == Counter(range(SAMPLES))
        assert sorted(got) == sorted(wanted)


class _Stream(IterableDataset[list[torch.Tensor]]):
    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return ([torch.tensor(number), torch.tensor(float(number))] for number in range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning")
def test_a_stream_with_a_length_is_not_read_ahead(tmp_path: Path) -> None:
    """Of a stream without one, the batch that Lightning has read ahead would be left out."""
    whole, first, second = recording_model(), recording_model(), recording_model()
    saving_trainer(tmp_path / "whole", BATCHES).fit(whole, DataLoader(_Stream(), BATCH))
    saving_trainer(tmp_path / "cut", 5).fit(first, DataLoader(_Stream(), BATCH))
    saving_trainer(tmp_path / "cut", BATCHES).fit(
        second, DataLoader(_Stream(), BATCH), ckpt_path=str(tmp_path / "cut/step=5.ckpt")
    )
    assert [*first.seen, *second.seen] == whole.seen
    assert len(whole.seen) == BATCHES
