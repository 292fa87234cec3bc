"""One rank of ``test_accelerate``: a loop under Accelerate, left in its second epoch and gone on with.

Arguments: a folder for what each rank has seen. Told what torchrun tells; the device is a fake one. Steps gather what
ranks have, and train nothing: PyTorch's first optimizer or distributed model imports its compiler, more than a second.
Hugging Face's datasets, which Accelerate would import, count as not installed: half a second.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from accelerate import Accelerator
from torch.utils.data import Subset

from minato_gpu import DataLoader
from minato_gpu.accelerated import prepare
from minato_gpu.device import accelerator as accelerators
from minato_gpu.engine import builder
from tests.support.fake_device import LAZY_CONSUMER, FakeDevice
from tests.support.numbers import PIPELINE, Numbers

LENGTH, BATCH, LEFT_AT, LATENESS = 144, 8, 4, 3


def main(folder: str) -> None:
    """Two epochs on this rank, in two lives."""
    accelerator: Any = Accelerator(cpu=True)
    device = FakeDevice(LAZY_CONSUMER)
    with (
        patch.dict(sys.modules, {"datasets": None}),
        patch.object(accelerators, "available", lambda _: True),
        patch.object(builder, "Accelerator", lambda _: device),
    ):
        told = train(accelerator, Path(folder, f"state-{accelerator.process_index}.json"))
    device.finish()
    Path(folder, f"{accelerator.process_index}.json").write_text(json.dumps(told), encoding="utf-8")
    accelerator.end_training()


def make(accelerator: Any) -> Any:
    """A loader as a user would have it prepared."""
    torch.manual_seed(1)
    loader: DataLoader[Any] = DataLoader(
        Subset(Numbers(), range(LENGTH)),
        BATCH,
        shuffle=True,
        num_workers=1,
        pipeline=PIPELINE,
        lanes=["cpu", "device"],
        device="cuda",
        in_order=False,
        max_lateness=LATENESS,
        generator=torch.Generator().manual_seed(7),
    )
    return accelerator.prepare(prepare(accelerator, loader))


def train(accelerator: Any, file: Path) -> dict[str, Any]:
    """Every step is a collective one, so ranks with unequal counts would never end."""
    loader = make(accelerator)
    seen: list[list[int]] = [[], []]
    lasts: list[bool] = []

    def step(batch: Any, into: list[int]) -> None:
        assert len(accelerator.gather(batch["x"].mean().unsqueeze(0))) == accelerator.num_processes
        into += batch["label"].tolist()
        lasts.append(accelerator.gradient_state.end_of_dataloader)

    for batch in loader:
        step(batch, seen[0])
    stats = loader.stats()
    for number, batch in enumerate(loader, start=1):
        step(batch, seen[1])
        if number == LEFT_AT:
            break
    file.write_text(json.dumps(loader.state_dict()), encoding="utf-8")
    del loader
    loader = make(accelerator)
    loader.load_state_dict(json.loads(file.read_text(encoding="utf-8")))
    for batch in loader:
        step(batch, seen[1])
    kept = {
        "pipeline": loader.pipeline is PIPELINE,
        "lateness": loader.max_lateness,
        "device": loader.base_dataloader.device,
    }
    return {"seen": seen, "lasts": lasts, "stats": _few(stats), "resumed": _few(loader.stats()), "kept": kept}


def _few(stats: dict[str, Any]) -> dict[str, Any]:
    return {name: stats[name] for name in ("samples_delivered", "batches_delivered", "device", "lateness")}


if __name__ == "__main__":
    main(*sys.argv[1:])
