"""What the GPU session measures with: the data, the transforms on the device, the model, prices and targets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import cv2
import numpy as np
import pytest
import torch

from benchmarks.compare.workloads import INDEX
from benchmarks.content import ContentError
from benchmarks.session import loaders, measure, steps, work
from benchmarks.session.dali import DaliGpu
from benchmarks.session.harm import priced_rows
from benchmarks.session.resnet import ResNet
from benchmarks.session.settings import Settings
from benchmarks.session.targets import targets
from benchmarks.session.transforms import brought, finished, resized
from pipelines import image_classification
from tests.waiting import wait_until


def settings(folder: Path) -> Settings:
    return Settings.usual("cpu", folder, quick=True)


# --- data --------------------------------------------------------------------------------------------------------


def test_each_round_has_every_photograph_once(photographs: Path) -> None:
    source = image_classification.dataset(photographs)
    selection = work.Selection(source, 2 * len(source) + 3, work.MIXED)
    rounds = np.split(selection.order, [len(source), 2 * len(source)])
    assert len(selection) == 2 * len(source) + 3
    assert sorted(rounds[0]) == sorted(rounds[1]) == list(range(len(source)))
    assert list(rounds[0]) != list(rounds[1])
    assert selection[5] == source[int(selection.order[5])]
    assert (selection.paths[5], selection.labels[5]) == (selection[5]["path"], selection[5]["label"])


def test_small_photographs_are_the_smallest_quarter(photographs: Path) -> None:
    source = image_classification.dataset(photographs)
    chosen = set(work.Selection(source, len(source), work.SMALL).order.tolist())
    sizes = [Path(path).stat().st_size for path in source.paths]
    others = set(range(len(source))) - chosen
    assert len(chosen) == len(source) // 4
    assert max(sizes[number] for number in chosen) <= min(sizes[number] for number in others)


@pytest.mark.parametrize(
    ("came", "ordered", "complaint"),
    [
        (list(range(40)), True, None),
        ([*range(1, 41), 0], True, None),
        ([0, 1, 2, 2], True, "more than once"),
        ([0, 1, 2, 2], False, "more than once"),
        ([*range(3), *range(4, 60)], True, r"should have come: \[3\]"),
        ([*range(3), *range(4, 60)], False, None),
        ([*range(50), *range(51, 60)], True, None),  # may still come
    ],
)
def test_what_came_is_checked(came: list[int], ordered: bool, complaint: str | None) -> None:
    if complaint is None:
        work.check_delivery(np.array(came), 4, ordered=ordered)
    else:
        with pytest.raises(ContentError, match=complaint):
            work.check_delivery(np.array(came), 4, ordered=ordered)


@pytest.mark.parametrize("squares", [True, False])
@pytest.mark.parametrize("decoder", ["opencv", "nvimgcodec"])
def test_peers_prepare_the_samples_of_the_pipeline(photographs: Path, squares: bool, decoder: str) -> None:
    asked = work.job(settings(photographs), samples=16)
    crops = loaders.Crops(asked, decoder, squares=squares, size=32)
    batch = finished(loaders.packed([crops[number] for number in range(8)], squares=squares), 32)
    taken = work.Taken()
    taken.add(batch)
    peer = loaders.TorchGpu("pytorch", 1, 32)
    assert taken.check(asked, peer.tolerance(asked, "cpu"), ordered=True, own_draws=False) == 8
    wrong = work.Taken()
    wrong.add({**batch, "image": batch["image"].flip(3)})
    with pytest.raises(ContentError, match="is off by"):
        wrong.check(asked, peer.tolerance(asked, "cpu"), ordered=True, own_draws=False)


# --- transforms on the device ------------------------------------------------------------------------------------


def test_crops_are_resized_as_opencv_does_it() -> None:
    rng = np.random.default_rng(0)
    crops = [rng.integers(0, 256, (*shape, 3)).astype(np.uint8) for shape in ((1, 1), (5, 90), (64, 48), (32, 32))]
    mirror = [False, True, True, False]
    extent = torch.tensor([crop.shape[:2] for crop in crops])
    counts = extent.prod(1)
    pixels = torch.from_numpy(np.concatenate([crop.reshape(-1, 3) for crop in crops]))
    found = resized(pixels, counts.cumsum(0) - counts, extent, torch.tensor(mirror), 32).numpy()
    for crop, turned, image in zip(crops, mirror, found, strict=True):
        wanted = cv2.resize(crop, (32, 32), interpolation=cv2.INTER_LINEAR)
        wanted = wanted[:, ::-1] if turned else wanted
        assert np.abs(image - wanted.astype(np.float32)).max() <= 1


def test_squares_and_crops_of_that_size_end_the_same() -> None:
    rng = np.random.default_rng(1)
    samples: list[dict[str, Any]] = [
        {"pixels": rng.integers(0, 256, (32, 32, 3)).astype(np.uint8), "mirror": number % 2 == 1, "label": number}
        for number in range(70)  # more than are resized at once
    ]
    samples = [{**sample, INDEX: number} for number, sample in enumerate(samples)]
    square, crop = (finished(loaders.packed(samples, squares=squares), 32) for squares in (True, False))
    assert square["image"].shape == (70, 3, 32, 32) and square["image"].dtype == torch.float32
    torch.testing.assert_close(square["image"], crop["image"])
    assert square["label"].tolist() == crop[INDEX].tolist() == list(range(70))


class FakeStream:
    """Notes what is asked of it."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.events = log, name, 0

    def record_event(self) -> str:
        self.events += 1
        return f"event {self.events}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


def test_batches_are_brought_one_ahead_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    current, side = FakeStream(log, "consumer"), FakeStream(log, "side")
    kept: list[str] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda: side)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append(stream.name))
    sample = {"pixels": np.zeros((5, 7, 3), np.uint8), "mirror": True, "label": 3, INDEX: 0}

    def source() -> Iterator[Any]:
        for number in range(3):
            log.append(f"asked for {number}")
            yield loaders.packed([sample], squares=False)

    shapes = [(batch["image"].device.type, batch["image"].shape) for batch in brought(source(), "meta", 32)]
    assert shapes == [("meta", (1, 3, 32, 32))] * 3
    assert log == [
        "asked for 0",
        "asked for 1",
        "consumer waits for event 1",
        "asked for 2",
        "consumer waits for event 2",
        "consumer waits for event 3",
    ]
    assert kept.count("consumer") == 9 and kept.count("side") == 18


def test_dali_accepts_the_graph_for_a_gpu(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dali = pytest.importorskip("nvidia.dali")
    monkeypatch.setattr(dali.Pipeline, "build", lambda self: None)  # the rest needs the GPU
    asked = work.job(settings(photographs), samples=16)
    for exec_dynamic in (True, False):
        graph = DaliGpu("dali", 2, hw_decoder_load=0.9, exec_dynamic=exec_dynamic)._graph(asked, "cuda")
        graph._build_graph()  # names and types of all arguments are checked
        made_on = {each.name.strip("_").rstrip("_0123456789"): each.outputs[0].device for each in graph._ops}
        assert made_on == {
            "reader": "cpu",
            "ImageRandomCrop": "gpu",
            "CoinFlip": "cpu",
            "Resize": "gpu",
            "CropMirrorNormalize": "gpu",
        }


# --- the step ----------------------------------------------------------------------------------------------------


def test_the_model_is_resnet_50() -> None:
    with torch.device("meta"):
        model = ResNet(1000)
        assert sum(weights.numel() for weights in model.parameters()) == 25_557_032
        features = model.stages(model.stem(torch.empty(2, 3, 224, 224)))
        assert features.shape == (2, 2048, 7, 7)
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


class FakeEvent:
    """Comes to pass when it is recorded; what is waited for is noted."""

    waited: ClassVar[list[int]] = []
    made: ClassVar[int] = 0

    def __init__(self, *, enable_timing: bool, blocking: bool) -> None:
        assert enable_timing and blocking
        self.number = FakeEvent.made
        FakeEvent.made += 1

    def record(self) -> None:
        """Now."""

    def synchronize(self) -> None:
        self.waited.append(self.number)

    def elapsed_time(self, end: FakeEvent) -> float:
        return 10.0 * (end.number - self.number)


def test_the_host_is_two_steps_ahead_of_the_device_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    watch = steps.Stopwatch("cuda")
    for _ in range(5):
        watch.time(lambda batch: None, {})
    assert FakeEvent.waited == [1, 3, 5]  # each step has two events
    assert watch.seconds() == [0.01] * 5


def test_the_most_memory_in_use_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([(90, 100), (60, 100), (20, 100)])
    last = (80, 100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: next(answers, last))
    with measure._watched(measure._used_bytes("cuda")) as peak:
        wait_until(lambda: peak[0] == 70)
    assert peak == [70]


def test_a_step_trains(photographs: Path) -> None:
    chosen = settings(photographs)
    torch.manual_seed(0)
    step = steps.Training(chosen)
    batch = next(steps.resident(chosen))
    watch = steps.Stopwatch("cpu")
    losses = []
    for _ in range(6):
        watch.time(step, batch)
        assert step.loss is not None
        losses.append(float(step.loss))
    assert losses[-1] < losses[0]
    assert len(watch) == len(watch.seconds()) == 6 and min(watch.seconds()) > 0


# --- prices and targets ------------------------------------------------------------------------------------------


def test_the_price_is_the_slope() -> None:
    points = [
        {"every": every, "device_share": share, "device_s_per_step": work_s, "step_s": 0.1 + 0.5 * work_s}
        for every, share, work_s in ((0.0, 0.0, 0.0), (2.0, 0.2, 0.02), (1.0, 0.4, 0.05), (0.0, 0.0, 0.0))
    ]
    rows = priced_rows(points)
    assert [row["name"] for row in rows[:2]] == ["no device work", "a batch for every 2 steps"]
    assert [row["repetitions"] for row in rows[:3]] == [2, 1, 1]
    assert [row["step_slowdown"] for row in rows[:3]] == pytest.approx([0.0, 0.1, 0.25])
    assert rows[-1]["step_s_per_device_s"] == pytest.approx(0.5)


def loader_row(case: str, name: str, *rates: float, **more: Any) -> dict[str, Any]:
    rate = float(np.median(rates))
    return {"case": case, "name": name, "batch": 100, "samples_per_s": rate, "samples_per_s_each": list(rates), **more}


def found(rows: list[dict[str, Any]], name: str, case: str) -> dict[str, Any]:
    (row,) = (row for row in targets(rows) if row["name"] == name and row["case"].startswith(case))
    return row


def test_nothing_measured_is_nothing_met() -> None:
    rows = targets([])
    assert len(rows) == 11
    assert all(row["measured"] is None and row["met"] is None and row["why"] == "not measured" for row in rows)


@pytest.mark.parametrize(("hybrid", "met"), [((28.0, 27.5), True), ((26.0, 26.5), False)])
def test_hybrid_of_sum(hybrid: tuple[float, float], met: bool) -> None:
    rows = [loader_row("rates", "cpu", 10, 10), loader_row("rates", "device", 20, 20)]
    row = found([*rows, loader_row("rates", "hybrid", *hybrid)], "hybrid_of_sum", "rates")
    assert row["met"] is met and row["low"] < row["measured"] < row["high"]
    assert row["measured"] == pytest.approx(np.sqrt(hybrid[0] * hybrid[1]) / 30)


def test_without_a_step_the_best_peer_must_be_beaten_by_half() -> None:
    rows = [loader_row("rates", "hybrid", 30.0), loader_row("rates", "spdl", 10.0)]
    assert found(rows, "ratio_to_best_peer", "rates")["met"] is True
    rows += [loader_row("rates", "dali", 25.0), {"case": "rates", "name": "pytorch", "missing": "not here"}]
    row = found(rows, "ratio_to_best_peer", "rates")
    assert (row["best_peer"], row["met"], row["target"], row["peers_absent"]) == ("dali", False, 1.5, ["pytorch"])
    assert row["measured"] == pytest.approx(1.2) and row["bottleneck"] == "preparation"


@pytest.mark.parametrize(("resident_step_s", "target"), [(100 / 14.0, 1.0), (100 / 16.0, 1.5)])
def test_training_must_be_faster_where_it_can_be(resident_step_s: float, target: float) -> None:
    rows = [loader_row("training", "hybrid", 12.0, resident_step_s=resident_step_s), loader_row("training", "dali", 10)]
    row = found(rows, "ratio_to_best_peer", "training")
    assert row["target"] == target and row["met"] is (target == 1.0)


@pytest.mark.parametrize(
    ("cpu_rate", "slowdown", "met"), [(9.9, 0.02, True), (9.9, 0.03, False), (9.0, 0.02, None), (9.0, 0.5, None)]
)
def test_the_step_counts_where_the_cpu_lane_suffices(cpu_rate: float, slowdown: float, met: bool | None) -> None:
    rows = [
        loader_row("light", "cpu", cpu_rate, resident_step_s=10.0, step_slowdown=0.01),
        loader_row("light", "hybrid", 9.9, resident_step_s=10.0, step_slowdown=slowdown),
    ]
    row = found(rows, "step_slowdown", "light")
    assert row["met"] is met and ("did not suffice" in row.get("why", "")) == (met is None)


def test_limits_of_memory_and_of_the_training_thread() -> None:
    times = {"next_p99_s": 2e-4, "next_p999_s": 1.1e-3, "pause_p99_s": 3e-4, "pause_p999_s": 1e-4}
    rows: list[dict[str, Any]] = [
        {"case": "memory", "name": "hybrid", "device_bytes_peak": 1_000_000_000},
        {"case": "memory", "name": "hybrid, budget", "device_bytes_peak": 999_999_999},
        {"case": "thread", "name": "hybrid", **times},
    ]
    met = {(row["name"], row["case"]): row["met"] for row in targets(rows) if row["measured"] is not None}
    assert met == {
        ("device_bytes_peak", "memory, hybrid"): False,
        ("device_bytes_peak", "memory, hybrid, budget"): True,
        ("next_p99_s", "thread"): True,
        ("next_p999_s", "thread"): False,
        ("pause_p99_s", "thread"): False,
        ("pause_p999_s", "thread"): True,
    }
