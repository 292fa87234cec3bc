"""Every example of the page for those who migrate runs, and delivers all samples; without its package it is skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from tests.contracts.datasets import Made, draw
from tests.support import pages
from tests.tools.test_lightning import recording_model, saving_trainer

PAGE = "minato_gpu/manual/migrating.md"
SAMPLES = 100


def _run(heading: str, names: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs the examples under a heading."""
    for example in pages.examples(PAGE, heading):
        pages.run(example, names, folder)
    return names


def test_changing_the_import_is_enough(tmp_path: Path) -> None:
    names = _run("Coming from PyTorch or torchdata", {"dataset": list(range(SAMPLES))}, tmp_path)
    assert names["loader"].stats()["samples_delivered"] == 20
    assert names["again"].stats()["samples_delivered"] == 80


def test_accelerate(accelerate: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    samples: Any = list(range(SAMPLES))
    names: dict[str, Any] = {"accelerator": accelerate.Accelerator(cpu=True), "loader": DataLoader(samples, 20)}
    names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 1.0)}
    assert _run("Accelerate", names, tmp_path)["loader"].stats()["samples_delivered"] == SAMPLES


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    module, batches = recording_model(), SAMPLES // 20
    names = {"dataset": Made(SAMPLES, draw), "trainer": saving_trainer(tmp_path, batches), "module": module}
    _run("Lightning", names, tmp_path)
    assert len(module.seen) == batches
    assert sorted(sample[0] for _, batch in module.seen for sample in batch) == list(range(SAMPLES))


@pytest.mark.usefixtures("accelerate")
@pytest.mark.filterwarnings("ignore")
def test_hugging_faces_trainer(tmp_path: Path) -> None:
    """Its data collator, batch size and workers are the Trainer's own; the model sees every sample once an epoch."""
    transformers = pytest.importorskip("transformers")
    trainer_of: Callable[..., Any] = _run("Hugging Face's Trainer", {}, tmp_path)["MyTrainer"]
    seen: list[float] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> Any:
            seen.extend(x.tolist())
            return {"loss": self.layer(x[:, None]).mean()}

    arguments = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=2, per_device_train_batch_size=20, dataloader_num_workers=2, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    samples = [{"x": torch.tensor(float(number))} for number in range(SAMPLES)]
    trainer = trainer_of(Model(), arguments, train_dataset=samples)
    trainer.train()
    assert sorted(seen) == sorted(2 * list(range(SAMPLES)))
    assert trainer.callback_handler.train_dataloader.stats()["samples_delivered"] == SAMPLES
