"""P1 to P4 where samples are cut: the same content at every split point, each sample once, each stage once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader, Pipeline, Stage
from minato_gpu.estimates.cuts import CutEstimator
from minato_gpu.memory.status_board import WorkerStatusBoard
from minato_gpu.pipeline.pipeline import CupyFunction, Field
from minato_gpu.scheduling.plans import Plan
from tests.support.numbers import BATCH, LENGTH, PIPELINE, Numbers, X, shift

pytestmark = pytest.mark.usefixtures("open_from_the_start")  # the plans then count from the first sample on

EPOCHS = 3
SLOW = 77
applied: Counter[tuple[int, float]] = Counter()  # the stage in thread workers, by sample and what its epoch drew
slow = threading.Event()  # one sample is slow in this epoch
told = threading.Event()  # the sample that is slow has been told to go elsewhere
slow_at: list[int] = []  # the worker thread that is at it


def pipeline(first: Callable[[Any, Any], Any] = shift) -> Pipeline:
    """A host read, and three stages that either lane can do, two of which draw."""
    read, shifts, doubles = PIPELINE.stages
    stages = (read, replace(shifts, cpu=first), doubles, replace(shifts, name="again"))
    return replace(PIPELINE, stages=stages)


def plan_for(monkeypatch: pytest.MonkeyPatch, cpu: float, device: float, *between: Plan) -> None:
    """Let every sample be predicted to cost this."""

    def of_features(self: Any, serials: list[int], keys: Any, given: Any) -> Any:
        count = len(serials)
        return [cpu] * count, [device] * count, [between] * count

    monkeypatch.setattr(CutEstimator, "of_features", of_features)


def content(loader: Any) -> dict[int, Any]:
    """Samples by label, each of which must come once."""
    found: dict[int, Any] = {}
    for batch in loader:
        for x, label, name in zip(batch["x"].cpu().clone(), batch["label"].tolist(), batch["name"], strict=True):
            assert label not in found and name == f"n{label}"
            found[label] = x
    assert sorted(found) == list(range(LENGTH))
    return found


def check_same(got: dict[int, Any], want: dict[int, Any]) -> None:
    assert all(torch.allclose(got[label], want[label], atol=1e-5) for label in want)


def loader_for(**more: Any) -> Any:
    parts: dict[str, Any] = {"pipeline": pipeline(), "generator": torch.Generator().manual_seed(5)}
    return DataLoader(Numbers(), BATCH, num_workers=2, **{**parts, **more})


@pytest.fixture(scope="module")
def wanted() -> list[dict[int, Any]]:
    """Epoch by epoch, on the CPU alone."""
    loader = loader_for(lanes=["cpu"], persistent_workers=True)
    return [content(loader) for _ in range(EPOCHS)]


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("order", [{}, {"in_order": False, "max_lateness": 3}], ids=["in order", "bounded"])
@pytest.mark.parametrize("kind", ["process", "thread"])
@pytest.mark.parametrize("cut", [2, 3])
def test_same_content_at_every_split_point(
    monkeypatch: pytest.MonkeyPatch, wanted: list[dict[int, Any]], cut: int, kind: str, order: dict[str, Any]
) -> None:
    plan_for(monkeypatch, 1.0, 1.0, Plan(cut, 1e-3, 1e-3))
    loader = loader_for(lanes=["cpu", "device"], worker_kind=kind, persistent_workers=True, **order)
    for want in wanted:
        check_same(content(loader), want)
        lanes = loader.stats()["lanes"]
        assert lanes["cpu"]["handed_over"] > 0
        assert lanes["cpu"]["samples"] + lanes["device"]["samples"] == LENGTH


def _slow_shift(fields: Any, params: Any) -> Any:
    number = int(fields["x"][0, 0])
    applied[number, params["shift"]] += 1
    if number == SLOW and slow.is_set():
        slow_at.append(int(threading.current_thread().name.rpartition("-")[2]))
        told.wait(60)
    return shift(fields, params)


@pytest.mark.usefixtures("no_leaks")
def test_a_sample_that_turns_out_slow_goes_on_on_the_device(
    monkeypatch: pytest.MonkeyPatch, wanted: list[dict[int, Any]]
) -> None:
    """It says so while it runs; no stage is applied twice."""
    plan_for(monkeypatch, 1e-3, 1.0, Plan(2, 1.1e-3, 5e-4), Plan(3, 1.2e-3, 4e-4))  # no plan is worth having
    hand_over, asked = WorkerStatusBoard.hand_over, []

    def tell(self: WorkerStatusBoard, run: int, chunk: int, splits: tuple[int, ...]) -> None:
        hand_over(self, run, chunk, splits)
        asked.append(chunk)
        if slow_at and self.find(run, chunk) == slow_at[-1]:  # on a busy machine others turn out slow as well
            told.set()

    monkeypatch.setattr(WorkerStatusBoard, "hand_over", tell)
    loader = loader_for(
        pipeline=pipeline(_slow_shift), lanes=["cpu", "device"], worker_kind="thread", persistent_workers=True
    )
    applied.clear()
    slow_at.clear()
    for want in wanted:
        check_same(content(loader), want)
        if handed := loader.stats()["lanes"]["cpu"]["handed_over"]:
            break
        told.clear()
        slow.set()
    slow.clear()
    assert set(applied.values()) == {1}
    assert 1 <= handed <= len(asked)


class Unsendable:
    """What pickling it runs raises no error of pickle's own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        raise RuntimeError("only through inheritance")


def _wrap(fields: Any, params: Any) -> Any:
    return {"h": Unsendable(int(fields["label"]))}


def _unwrap(fields: Any, params: Any) -> Any:
    return {"x": np.full((4, 40), fields["h"].number, np.float32)}


def _wrap_on_device(xp: Any, fields: Any, params: Any) -> Any:
    return _wrap(fields, params)


def _unwrap_on_device(xp: Any, fields: Any, params: Any) -> Any:
    return _unwrap(fields, params)


@pytest.mark.usefixtures("no_leaks")
def test_what_cannot_leave_its_process_is_prepared_there_and_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Content does not depend on where a sample was to be cut; and the cut is not asked for in vain for ever."""
    told: list[int] = []
    monkeypatch.setattr(CutEstimator, "could_not_send", lambda self, split, samples: told.append(split))
    plan_for(monkeypatch, 1.0, 1.0, Plan(2, 1e-3, 1e-3))
    cut = Pipeline(
        (
            pipeline().stages[0],
            Stage("wrap", ("label",), {"h": Field(object)}, cpu=_wrap, device=CupyFunction(_wrap_on_device)),
            Stage("unwrap", ("h",), {"x": X}, cpu=_unwrap, device=CupyFunction(_unwrap_on_device)),
        ),
        outputs=("x", "label", "name"),
        name="tests",
    )
    found = content(loader_for(pipeline=cut, lanes=["cpu", "device"], worker_kind="process"))
    assert all((x == label).all() for label, x in found.items())
    assert set(told) == {2}
