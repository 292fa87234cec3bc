"""On a GPU: batches hold what they should while the consumer's kernels are slow and its references short-lived.

Each batch is full of its own number. The consumer's stream is kept busy, so that a batch is dropped, and its memory may
be given to later ones, long before it is read; what is read is compared on the device and looked at in the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from tests.support.numbers import COSTLY, PIPELINE, Numbers, Plain

_SLOW = 2_000_000  # clock cycles for which a kernel keeps the stream busy, about a millisecond
EPOCHS = 4
MOST_EPOCHS = 400
SHARES = [(["device"], 1.0), (["cpu", "device"], 0.1)]  # of the samples that the device lanes make at least


@contextmanager
def _stream(own: bool) -> Iterator[None]:
    if not own:
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
        yield


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


def _wrong_rows(loader: Any, held: int) -> int:
    """How many values differ from those of their row's label, with ``held`` batches kept back by the consumer."""
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    ahead: deque[Any] = deque()

    def look(x: torch.Tensor, label: torch.Tensor) -> None:
        torch.cuda._sleep(_SLOW)
        wrong.add_((x != label[:, None, None]).sum())

    for _ in range(EPOCHS):
        for x, label in loader:
            ahead.append((x, label))
            if len(ahead) > held:
                look(*ahead.popleft())
    while ahead:
        look(*ahead.popleft())
    return int(wrong.item())


@pytest.mark.gpu
@pytest.mark.parametrize("held", [0, 3])
@pytest.mark.parametrize("own", [False, True], ids=["default stream", "own stream"])
@pytest.mark.parametrize("in_order", [True, False])
def test_batches_are_whole_however_late_they_are_read(held: int, own: bool, in_order: bool) -> None:
    loader = DataLoader(
        Plain(), 8, shuffle=True, num_workers=2, device="cuda", persistent_workers=True, in_order=in_order
    )
    with _stream(own):
        assert _wrong_rows(loader, held) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("lanes", "least"), SHARES, ids=str)
def test_what_the_device_lane_made_is_whole_too(lanes: list[str], least: float) -> None:
    """Sample n is 2 (n + shift) for a shift from 0 to 1, whichever lane made it."""
    loader = DataLoader(
        Numbers(), 8, num_workers=2, device="cuda", pipeline=COSTLY, lanes=lanes, persistent_workers=True
    )
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in _epochs(loader, least):
        for batch in loader:
            torch.cuda._sleep(_SLOW)
            over = batch["x"] - 2 * batch["label"][:, None, None]
            wrong.add_(((over < 0) | (over > 2) | (over != over[:, :1, :1])).sum())
            del batch, over
    assert int(wrong.item()) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(("lanes", "least"), [(["cpu"], 0.0), *SHARES], ids=str)
def test_several_lanes_on_one_device(lanes: list[str], least: float, in_order: bool) -> None:
    """Batches in turn from two executors with streams of their own, by one way and under one budget."""
    loader = DataLoader(
        Numbers(),
        8,
        num_workers=2,
        device=["cuda:0", "cuda:0"],
        pipeline=COSTLY,
        lanes=lanes,
        in_order=in_order,
        persistent_workers=True,
    )
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in _epochs(loader, least):
        labels = []
        for batch in loader:
            torch.cuda._sleep(_SLOW)
            over = batch["x"] - 2 * batch["label"][:, None, None]
            wrong.add_(((over < 0) | (over > 2) | (over != over[:, :1, :1])).sum())
            labels.append(batch["label"])
            del batch, over
        assert sorted(torch.cat(labels).tolist()) == list(range(len(Numbers())))
    assert int(wrong.item()) == 0
    assert len(loader.stats()["device"]) == 2


# without the marker: a machine with one GPU can prove everything else
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("in_order", [True, False])
def test_two_devices(in_order: bool) -> None:
    loader = DataLoader(
        Numbers(),
        8,
        num_workers=2,
        device=["cuda:0", "cuda:1"],
        pipeline=PIPELINE,
        lanes=["device"],
        in_order=in_order,
        persistent_workers=True,
    )
    wrong = [torch.zeros((), dtype=torch.int64, device=f"cuda:{number}") for number in range(2)]
    for _ in range(EPOCHS):
        for number, batch in enumerate(loader):
            assert batch["x"].device.index == batch["label"].device.index == number % 2
            with torch.cuda.device(number % 2):
                torch.cuda._sleep(_SLOW)
            over = batch["x"] - 2 * batch["label"][:, None, None]
            wrong[number % 2].add_(((over < 0) | (over > 2) | (over != over[:, :1, :1])).sum())
            del batch, over
    assert [int(each.item()) for each in wrong] == [0, 0]
