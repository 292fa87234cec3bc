"""Batches on a GPU hold what they should, however late they are copied and read: what is read too early, or written
over, shows. (The fake device does the same in any order: ``test_device_batches``.)

The consumer's kernels are slow and its references short-lived: a batch, full of its own number, is dropped, and its
memory may be given to later ones, long before it is read. What is read is compared on the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader, Pipeline, Stage
from minato_gpu.device.accelerator import Accelerator
from minato_gpu.pipeline.pipeline import DaliFragment, Field
from tests.support.numbers import COSTLY, LENGTH, Numbers

SIDE = 2500  # of a large sample of float32: 25 MB
SLOW = 2_000_000  # clock cycles for which a kernel keeps the consumer's stream busy, about a millisecond
SLOW_COPY = 20_000_000  # the same before every copy of large batches
EPOCHS, MOST_EPOCHS = 2, 400
LEAST = {"cpu": 0.0, "device": 1.0, "cpu+device": 0.1}  # the device lanes' share of the samples


def _read(fields: Any, params: Any) -> Any:
    return {"x": np.full((SIDE, SIDE), 2 * fields["n"], np.float32), "label": fields["n"]}


def _shift(fields: Any, params: Any) -> Any:
    time.sleep(1e-2)  # what it costs: the CPU lane cannot keep up, so the device has work
    return {"x": fields["x"] + np.float32(1)}


def _shift_by_dali(dali: Any, fields: Any, params: Any, device: str) -> Any:
    return {"x": fields["x"] + np.float32(1)}


_X = Field(np.float32, (SIDE, SIDE))
_STAGES = (
    Stage("read", ("n",), {"x": _X, "label": Field(np.int64)}, cpu=_read),
    Stage("shift", ("x",), {"x": _X}, cpu=_shift, device=DaliFragment(_shift_by_dali)),
)
KINDS: dict[str, tuple[Any, Pipeline, int, int]] = {  # devices, pipeline, samples of all and of a batch
    "large": ("cuda", Pipeline(_STAGES, outputs=("x", "label"), name="large"), 40, 4),
    "small": ("cuda", COSTLY, LENGTH, 8),
    "two lanes": (["cuda:0", "cuda:0"], COSTLY, LENGTH, 8),
}


def _epochs(loader: Any, least: float) -> Iterator[None]:
    """Epochs until there have been a few, and the device lanes have made their share of the last one: a lane that opens
    late finds nothing to do at first."""
    share = 0.0
    for epoch in range(MOST_EPOCHS):
        if epoch >= EPOCHS and share >= least:
            break
        yield
        stats = loader.stats()
        made = sum(lane["samples"] for name, lane in stats["lanes"].items() if name.startswith("device"))
        share = made / stats["samples_delivered"]
    assert share >= least


def _wrong(batch: Any) -> torch.Tensor:
    """How many values are wrong: sample n is 2 (n + shift) for a shift from 0 to 1, whichever lane made it."""
    over = batch["x"] - 2 * batch["label"][:, None, None]
    wrong: torch.Tensor = ((over < 0) | (over > 2) | (over != over[:, :1, :1])).sum()
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lanes", LEAST)
def test_batches_are_whole(lanes: str, kind: str, in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two lanes on one device batches come in turn, from executors with streams of their own, by one way and under
    one budget."""
    device, pipeline, samples, size = KINDS[kind]
    copy = Accelerator.copy

    def slowly(self: Accelerator, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        torch.cuda._sleep(SLOW_COPY)
        copy(self, into, sources)

    if kind == "large":
        monkeypatch.setattr(Accelerator, "copy", slowly)
    more: dict[str, Any] = {"lanes": lanes.split("+"), "in_order": in_order, "persistent_workers": True}
    more |= {"device": device, "pipeline": pipeline, "sampler": range(samples)}
    loader = DataLoader(Numbers(), size, num_workers=2, **more)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in _epochs(loader, LEAST[lanes]):
        labels = []
        for batch in loader:
            torch.cuda._sleep(SLOW)
            wrong.add_(_wrong(batch))
            labels.append(batch["label"].clone())
            del batch
        assert sorted(torch.cat(labels).tolist()) == list(range(samples))
    assert int(wrong.item()) == 0
    assert device == "cuda" or len(loader.stats()["device"]) == 2
