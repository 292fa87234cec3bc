"""One rank of ``test_ranks``: started by torchrun, with a device of its own (a fake one), joined to the others by gloo.

Arguments: a folder for what each rank has seen, the data set's length, which lanes, numbers that cannot be read, and
how many devices each rank drives.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed
from torch.utils.data import DistributedSampler, Subset

from minato_gpu import DataLoader
from minato_gpu.device import accelerator
from minato_gpu.device.collated import mapped
from minato_gpu.engine import builder
from minato_gpu.epoch import delivery
from tests.support.fake_device import FakeDevice
from tests.support.numbers import PIPELINE, Numbers

EPOCHS = 2


def order(length: int, rank: int, epoch: int) -> list[int]:
    """What the sampler gives to a rank."""
    sampler: DistributedSampler[int] = DistributedSampler(range(length), 2, rank, seed=3)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return list(sampler)


class Broken(Numbers):
    """Some numbers cannot be read."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __getitem__(self, n: int) -> Any:
        if n in self.bad:
            raise ValueError(f"number {n} cannot be read")
        return super().__getitem__(n)


def main(folder: str, length: str, lanes: str, bad: str = "", count: str = "1") -> None:
    """Train, as it were: every batch is a collective step, so ranks with unequal counts would never end."""
    torch.distributed.init_process_group("gloo")
    devices: list[FakeDevice] = []
    for _ in range(int(count)):
        devices.append(FakeDevice(torch.distributed.get_rank(), beside=devices))
    with (
        patch.object(accelerator, "available", lambda _: True),
        patch.object(builder, "Accelerator", lambda device: devices[device.index % len(devices)]),
        patch.object(delivery, "to_device", lambda batch, at: mapped(batch, devices[at.index % len(devices)].put)),
    ):
        train(folder, int(length), lanes, devices, {int(number) for number in bad.split(",") if number})
    torch.distributed.destroy_process_group()


def train(folder: str, length: int, lanes: str, devices: list[FakeDevice], bad: set[int]) -> None:
    """All epochs of this rank."""
    rank, count = torch.distributed.get_rank(), len(devices)
    dataset: Subset[int] = Subset(Broken(bad), range(length))
    sampler: DistributedSampler[int] = DistributedSampler(dataset, seed=3)
    loader = DataLoader(
        dataset,
        4,
        sampler=sampler,
        num_workers=1,
        device=f"cuda:{rank}" if count == 1 else [f"cuda:{rank * count + number}" for number in range(count)],
        pipeline=PIPELINE,
        lanes=["cpu" if lane == "cpu" else "device" for lane in lanes.split("+")],
        persistent_workers=True,
        on_error="skip" if bad else "raise",
    )
    padded = 0
    seen: list[list[int]] = []
    steps = torch.zeros(())
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        labels: list[int] = []
        for number, batch in enumerate(loader):
            device = devices[number % count]
            assert device.owns(batch["label"])
            device.read(batch["label"], lambda tensor, into=labels: into.extend(tensor.tolist()))  # type: ignore[misc]
            steps += 1
            total = steps.clone()
            torch.distributed.all_reduce(total)
            assert total == steps * torch.distributed.get_world_size()
        for device in devices:
            device.finish()
        seen.append(labels)
        padded += loader.stats()["samples_padded"]
    Path(folder, f"{rank}.json").write_text(
        json.dumps({"seen": seen, "steps": int(steps), "padded": padded}), encoding="utf-8"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
