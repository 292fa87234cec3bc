"""Bytes that come while a device lane has yet to open: some samples of a place are inspected, others are not."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minato_gpu import DataLoader, Pipeline, Source, Stage, read_bytes
from minato_gpu.engine.pump import Pump
from minato_gpu.engine.read_ahead import ReadAhead
from minato_gpu.lanes.device_lane import DeviceLane
from minato_gpu.pipeline import CupyFunction, Field
from minato_gpu.samples import TicketId
from minato_gpu.scheduling.messages import TicketSpan, tickets
from minato_gpu.window.records import Record

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCH = 32
SAMPLES = 2 * BATCH
BEFORE = BATCH + BATCH // 2  # so many come before the lane opens
go_on = threading.Event()
X = Field(np.float32, (4,))


class Files:
    """Four numbers in a file of each sample."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def source(self, key: int) -> Source:
        return Source(str(self.root / f"{key}.bin"))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, key: int) -> dict[str, Any]:
        return {"key": key, "bytes": read_bytes(self.root / f"{key}.bin")}


def _opened(fields: Any, params: Any) -> Any:
    assert go_on.wait(60)
    return {"x": np.frombuffer(fields["bytes"], np.float32)}


def _doubled(fields: Any, params: Any) -> Any:
    return {"x": fields["x"] * np.float32(2)}


def _doubled_on_device(xp: Any, fields: Any, params: Any) -> Any:
    return {"x": fields["x"] * xp.float32(2)}


PIPELINE = Pipeline(
    (
        Stage("open", ("bytes",), {"x": X}, cpu=_opened),
        Stage("double", ("x",), {"x": X}, cpu=_doubled, device=CupyFunction(_doubled_on_device)),
    ),
    outputs=("key", "x"),
    name="tests",
)


class LateLane:
    """Some bytes come, then the device lane opens, then the others come, and only then any sample is prepared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.some_came, self.is_open = threading.Event(), False
        self.held: list[TicketId] = []
        receive, admit, open_, opened = ReadAhead.receive, ReadAhead.admit, DeviceLane._open, Pump._change

        def admitted(ahead: ReadAhead, record: Record) -> list[TicketSpan]:
            self.held += tickets(admit(ahead, record))
            return []

        def received(ahead: ReadAhead) -> list[TicketSpan]:
            self.held = sorted([*self.held, *tickets(receive(ahead))])
            return self.let_go()

        def open_late(lane: DeviceLane) -> None:
            assert self.some_came.wait(60)
            open_(lane)

        def note(pump: Pump, lane: Any, slots: int) -> None:
            opened(pump, lane, slots)
            self.is_open = self.is_open or isinstance(lane, DeviceLane)

        monkeypatch.setattr(ReadAhead, "admit", admitted)
        monkeypatch.setattr(ReadAhead, "receive", received)
        monkeypatch.setattr(DeviceLane, "_open", open_late)
        monkeypatch.setattr(Pump, "_change", note)

    def let_go(self) -> list[TicketSpan]:
        """What the scheduler is told of now."""
        came = self.some_came.is_set()
        if (came and not self.is_open) or len(self.held) < (SAMPLES - BEFORE if came else BEFORE):
            return []
        told, self.held = (self.held, []) if came else (self.held[:BEFORE], self.held[BEFORE:])
        (go_on if came else self.some_came).set()
        return [(serial, TicketId(serial + 1)) for serial in told]


def test_of_one_place_some_are_inspected_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in range(SAMPLES):
        np.full(4, key, np.float32).tofile(tmp_path / f"{key}.bin")
    late = LateLane(monkeypatch)
    go_on.clear()
    dataset: Any = Files(tmp_path)
    loader: DataLoader[Any] = DataLoader(
        dataset, BATCH, num_workers=2, worker_kind="thread", pipeline=PIPELINE, lanes=("cpu", "device")
    )
    batches = list(loader)
    assert late.is_open and not late.held
    assert [key for batch in batches for key in batch["key"].tolist()] == [*range(SAMPLES)]
    assert all((batch["x"] == 2 * batch["key"][:, None]).all() for batch in batches)
