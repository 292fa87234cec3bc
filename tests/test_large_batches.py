"""Batches of 100 MB behind slow copies, made by a DALI stage: what is read too early, or written over, shows.

On the fake device the same at a small size, where copies are as late as events allow.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from minato_gpu import DataLoader, Pipeline, Stage
from minato_gpu.device.accelerator import Accelerator
from minato_gpu.pipeline.pipeline import DaliFragment, Field
from tests.support.device_batches import fake
from tests.support.fake_device import FakeDevice
from tests.support.numbers import COSTLY
from tests.support.numbers import Numbers as Canaries

__all__ = ["fake"]

BATCH, BATCHES = 4, 16
SIDE = {"fake": 20, "cuda": 2500}  # of a sample of float32: 25 MB on a GPU
LEAST = {"cpu": 0.0, "device": 1.0, "cpu+device": 0.1}  # the device's share of the samples
SLOW = 20_000_000  # cycles before every copy: about ten milliseconds
DEVICES = ["fake", pytest.param("cuda", marks=pytest.mark.gpu)]


class Numbers(Dataset[Any]):
    """Sample ``n`` is {"n": n, "side": side}."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, n: int) -> Any:
        return {"n": n, "side": self.side}


def _read(fields: Any, params: Any) -> Any:
    return {"x": np.full((fields["side"], fields["side"]), fields["n"], np.float32), "label": fields["n"]}


def _shift(fields: Any, params: Any) -> Any:
    time.sleep(1e-2)  # what it costs: the CPU lane cannot keep up, so the device has work
    return {"x": fields["x"] + np.float32(1)}


def _shift_by_dali(dali: Any, fields: Any, params: Any, device: str) -> Any:
    return {"x": fields["x"] + np.float32(1)}


def pipeline(side: int) -> Pipeline:
    """x: n + 1 everywhere; label: n."""
    x = Field(np.float32, (side, side))
    return Pipeline(
        (
            Stage("read", ("n", "side"), {"x": x, "label": Field(np.int64)}, cpu=_read),
            Stage("shift", ("x",), {"x": x}, cpu=_shift, device=DaliFragment(_shift_by_dali)),
        ),
        outputs=("x", "label"),
        name="large",
    )


@pytest.fixture(params=DEVICES)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeDevice | None:
    """The fake device; None where it is a GPU, whose copies are slow then."""
    if request.param == "fake":
        return cast("FakeDevice", request.getfixturevalue("fake")())
    copy = Accelerator.copy

    def slowly(self: Accelerator, into: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        torch.cuda._sleep(SLOW)
        copy(self, into, sources)

    monkeypatch.setattr(Accelerator, "copy", slowly)
    return None


@pytest.mark.usefixtures("open_from_the_start")
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("lanes", [["cpu"], ["device"], ["cpu", "device"]], ids="+".join)
def test_large_batches_are_whole(machine: FakeDevice | None, lanes: Any, in_order: bool) -> None:
    side = SIDE["cuda" if machine is None else "fake"]
    loader = DataLoader(
        Numbers(side),
        BATCH,
        shuffle=True,
        num_workers=2,
        device="cuda",
        pipeline=pipeline(side),
        lanes=lanes,
        in_order=in_order,
        persistent_workers=True,
    )
    for _ in range(2):
        seen, wrong = _epoch(machine, loader)
        assert sorted(seen) == list(range(len(loader.dataset)))  # type: ignore[arg-type]
        assert wrong == 0
    assert _share(loader.stats()) >= LEAST["+".join(lanes)]


def _epoch(machine: FakeDevice | None, loader: Any) -> tuple[list[int], int]:
    """The labels that were read, and how many values were not their label's; no batch is kept."""
    labels: list[torch.Tensor] = []
    wrong: list[torch.Tensor] = []
    for batch in loader:
        for n in range(len(batch["label"])):
            if machine is None:
                labels.append(batch["label"][n].clone())
                wrong.append((batch["x"][n] != batch["label"][n] + 1).sum())
            else:
                machine.read(batch["label"][n], lambda t: labels.append(t.clone()))
                machine.read(batch["x"][n], lambda t: wrong.append((t != labels[-1] + 1).sum()))
        del batch
    if machine is not None:
        machine.finish()
    return [int(each) for each in labels], sum(int(each) for each in wrong)


def _share(stats: Any) -> float:
    """The device lane's share of all that the last epoch delivered."""
    made = stats["lanes"].get("device", {"samples": 0})["samples"]
    return float(made / stats["samples_delivered"])


# --- on a GPU: batches hold what they should --------------------------------------------------------------------------


# The consumer's kernels are slow and its references short-lived: a batch, full of its own number, is dropped, and its
# memory may be given to later ones, long before it is read. What is read is compared on the device.
_SLOW = 2_000_000  # clock cycles for which a kernel keeps the stream busy, about a millisecond
EPOCHS = 4
MOST_EPOCHS = 400
SHARES = [
    (["cpu"], 0.0),
    (["device"], 1.0),
    (["cpu", "device"], 0.1),
]  # of the samples that the device lanes make at least


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
@pytest.mark.parametrize("device", ["cuda", ["cuda:0", "cuda:0"]], ids=["one lane", "two lanes"])
@pytest.mark.parametrize(("lanes", "least"), SHARES, ids=str)
def test_what_device_lanes_made_is_whole_too(lanes: list[str], least: float, device: Any, in_order: bool) -> None:
    """Of two lanes on one device batches come in turn, from executors with streams of their own, by one way and under
    one budget."""
    more: dict[str, Any] = {"pipeline": COSTLY, "lanes": lanes, "in_order": in_order, "persistent_workers": True}
    loader = DataLoader(Canaries(), 8, num_workers=2, device=device, **more)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in _epochs(loader, least):
        labels = []
        for batch in loader:
            torch.cuda._sleep(_SLOW)
            wrong.add_(_wrong(batch))
            labels.append(batch["label"])
            del batch
        assert sorted(torch.cat(labels).tolist()) == list(range(len(Canaries())))
    assert int(wrong.item()) == 0
    assert device == "cuda" or len(loader.stats()["device"]) == 2
