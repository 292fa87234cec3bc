"""Predicted against measured: epochs of the four workloads in other settings than the one that was measured.

Each workload's real files lie behind a server that gives them at a chosen rate and latency (``benchmarks.throttle``). A
*profile* is measured by a few runs of this loader: what samples cost a worker, how that grows with workers, what steps
and the loader take on the consumer's thread, how storage answers. From that alone
``minato_gpu.lab.analysis.predict`` says what an epoch takes in each setting. Profile and settings are run in turns.

    predicted_s, low_s, high_s    of an epoch, caches being full; and the interval of nine of ten draws
    measured_s, spread_s          mean over the epochs that count, of each the median of the repetitions; interquartile
                                  range of the repetitions' means
    error                         predicted over measured, less one
    within                        whether that is at most max(4 %, twice the spread)

Preparation is *slept*: as long as each sample costs when it is prepared alone, times a factor that makes an epoch of
two workers as long as ``--seconds``. So there can be more workers than cores, and what other processes of the machine
do disturbs little.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import thread_time
from typing import Any, NamedTuple

import click
import numpy as np

from benchmarks import report
from benchmarks.compare.workloads import INDEX
from benchmarks.isolate import isolated
from benchmarks.throttle import Throttle, server
from benchmarks.turns import in_turns
from benchmarks.whatif_run import (
    LATENCY_MS,
    WARM,
    Beyond,
    Data,
    Measured,
    Stored,
    Way,
    measure,
    measured_storage,
    profile_of,
    profile_ways,
    written,
)
from minato_gpu.lab.analysis.predict import Prediction, Predictor
from minato_gpu.lab.analysis.profile import Profile, Setting
from minato_gpu.samples import sample_seed
from minato_gpu.sampling.lookahead import DistributedOrders

COUNTS = {"image_classification": 384, "object_detection": 256, "segmentation_3d": 160, "speech_recognition": 256}
WORKERS = 2
_SHOWN = (
    *("question", "setting", "predicted_s", "measured_s", "spread_s", "error", "within", "failed"),
    *("points", "median_error", "p90_error", "within_share"),
)
_ALLOWED = 0.04


# --- the settings: each as it is run, and as it is predicted --------------------------------------------------------


QUESTIONS = ("cache", "workers", "step", "latency")
POLICIES = ("minio", "next-use", "lru")
_FILLING = 5  # of two shards: the epochs that are predicted, whose orders are known, are those after them


@dataclass(frozen=True)
class Point:
    """A setting: as it is run, and as it is asked for."""

    question: str
    name: str
    way: Way
    setting: Setting


class Around(NamedTuple):
    """What settings are chosen around: a batch, seconds and bytes of a mean sample."""

    batch: int
    prepare_s: float
    nbytes: float
    base: Way
    quick: bool


def points(question: str, around: Around) -> Iterator[Point]:
    """The settings of a question."""
    base, quick = around.base, around.quick
    if question == "cache":
        yield from _caches(around)
    elif question == "workers":
        for workers in (1, 2) if quick else (1, 2, 4, 8, 16):
            way = replace(base, workers=workers, cache=WARM, epochs=max(base.epochs, workers // 2))
            yield Point(question, f"{workers} workers", way, Setting(workers=workers, cache=WARM))
    elif question == "step":
        balance = around.batch * around.prepare_s / base.workers
        for part in (1.0,) if quick else (0.25, 0.5, 0.8, 1.0, 1.25, 2.0):
            way = replace(base, cache=WARM, step_s=part * balance)
            yield Point(question, f"{part:g} of balance", way, Setting(cache=WARM, step_s=part * balance))
    else:
        rate = _rate(around, 1.5)  # at once, the server would take the cores that it has in common with the loader
        for latency in (20.0,) if quick else (0.0, 5.0, 20.0, 50.0, 100.0):
            way = replace(base, shards=2, rate=rate, latency_ms=latency, filling=_FILLING, epochs=4)
            yield Point(question, f"{latency:g} ms", way, Setting(latency_s=latency / 1e3, bytes_per_s=rate))


def _caches(around: Around) -> Iterator[Point]:
    """Storage that gives three fifths of what workers could prepare."""
    rate = _rate(around, 0.6)
    shared = replace(around.base, shards=2, rate=rate, latency_ms=LATENCY_MS, filling=_FILLING, epochs=4)
    yield Point("cache", "no cache", shared, Setting(bytes_per_s=rate))
    for policy in POLICIES:
        for share in (0.5,) if around.quick else (0.25, 0.5, 0.75, 1.0):
            way = replace(shared, cache=share, policy=policy)
            yield Point("cache", f"{policy} {share:g}", way, Setting(cache=share, policy=policy, bytes_per_s=rate))


def _rate(around: Around, times: float) -> float:
    """Bytes a second: so many times what workers could prepare."""
    return times * around.base.workers / around.prepare_s * around.nbytes


def asked(profile: Profile, beyond: Beyond, point: Point) -> tuple[Profile, Setting]:
    """The profile as this setting reads the data, and the setting with what a request and a sleep take beyond their
    nominal time."""
    way, setting = point.way, point.setting
    storage = profile.storage
    assert storage is not None
    own = profile
    if way.shards > 1:
        samples = -(-profile.samples // way.shards)
        own = replace(own, samples=samples, shards=way.shards, overlap=False, between_s=beyond.between_s)
    nominal = LATENCY_MS / 1e3
    if setting.latency_s is not None:
        setting = replace(setting, latency_s=max(0.0, storage.latency_s - nominal) + setting.latency_s)
    if setting.step_s:
        setting = replace(setting, step_s=setting.step_s + beyond.sleep_s)
    return own, setting


# --- the runs -------------------------------------------------------------------------------------------------------


def costs_alone(data: Data) -> tuple[float, ...]:
    """CPU seconds of each sample, one after the other."""
    dataset = Stored(data, "")
    found = []
    for index in range(len(dataset)):
        begin = thread_time()
        dataset.pipeline.run({**dataset.files[index], INDEX: np.int64(index)}, sample_seed(0, 0, index, 0))
        found.append(thread_time() - begin)
    return tuple(found)


def workload_rows(
    data: Data,
    questions: Sequence[str],
    repetitions: int,
    seconds: float,
    *,
    quick: bool,
) -> Iterator[dict[str, Any]]:
    """A row for each setting of each question."""
    with server(Throttle(), 0, folder=data.folder) as address:
        costs = np.array(isolated(costs_alone, data, timeout_s=600.0))
        costs *= WORKERS * seconds / costs.sum()
        base = Way(WORKERS, slept=tuple(costs.tolist()), epochs=1 if quick else 3)
        storage = measured_storage(data, address)
        ways = profile_ways(data, base, costs.tolist(), quick=quick)
        around = Around(data.batch, float(costs.mean()), storage.nbytes, base, quick)
        everything = [point for question in questions for point in points(question, around)]
        turns = [_Turn(way, name) for name, way in ways.items()]
        turns += [_Turn(point.way, f"{point.question}: {point.name}", point) for point in everything]

        seeds = {turn.name: count() for turn in turns}

        def run(turn: _Turn) -> Measured:
            return isolated(measure, data, turn.way, address, next(seeds[turn.name]), timeout_s=300.0, settle_s=0.2)

        runs, errors = in_turns(
            data.name, turns, repetitions, run, lambda one: f"{np.mean(one.seconds):.3f} s an epoch"
        )
        profile, beyond = profile_of(data, len(costs), ways, runs, storage)
        report.progress(f"{data.name}: {_said(profile, beyond)}")
        predictors: dict[int, Predictor] = {}
        for turn in turns:
            if turn.point is not None:
                own, setting = asked(profile, beyond, turn.point)
                predictor = predictors.setdefault(own.shards, Predictor(own, _orders(own, len(costs))))
                predicted = predictor.predict(setting, draws=2 if quick else 8)
                yield _row(data, turn.point, predicted, runs[turn.name], errors.get(turn.name))


def _orders(profile: Profile, samples: int) -> DistributedOrders | None:
    """Of a ``DistributedSampler``."""
    ranks = profile.shards
    return DistributedOrders(samples, True, False, 0, 0, ranks, 0, 1) if ranks > 1 else None


@dataclass(frozen=True)
class _Turn:
    way: Way
    name: str
    point: Point | None = None


def _said(profile: Profile, beyond: Beyond) -> str:
    storage = profile.storage
    assert storage is not None
    rates = ", ".join(f"{workers} workers {rate:.0f}/s" for workers, rate in profile.scaling)
    return (
        f"a sample {1e3 * float(np.mean(profile.prepare_s)):.2f} ms, {rates}; the loader"
        f" {1e3 * profile.loader_s:.2f} ms a batch, {1e3 * profile.between_s:.1f} ms an epoch,"
        f" {1e3 * beyond.between_s:.1f} ms one that waits for the one before;"
        f" a request {1e3 * storage.latency_s:.1f} ms, of which {1e3 * storage.cpu_s:.2f} ms one after the other"
    )


def _row(
    data: Data, point: Point, predicted: Prediction, found: Sequence[Measured], error: str | None
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "case": data.name,
        "workload": data.name,
        "question": point.question,
        "setting": point.name,
        "predicted_s": predicted.epoch_s,
        "low_s": predicted.low_s,
        "high_s": predicted.high_s,
        "predicted_reads": predicted.reads,
    }
    if found:
        row["measured_s"] = float(np.median([each.seconds for each in found], axis=0).mean())
        row["spread_s"] = report.spread([float(np.mean(each.seconds)) for each in found])
        row["measured_reads"] = float(np.mean([each.reads for each in found]))
        row["error"] = predicted.epoch_s / row["measured_s"] - 1
        allowed = max(_ALLOWED, 2 * row["spread_s"] / row["measured_s"])
        row["within"] = bool(abs(row["error"]) <= allowed)
    return row | ({} if error is None else {"failed": error})


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each question and one for all: the median error, and the share of points within."""
    known = [row for row in rows if "error" in row]
    for question in (*dict.fromkeys(row["question"] for row in known), "all"):
        some = [row for row in known if question in ("all", row["question"])]
        yield {
            "case": "summary",
            "question": question,
            "points": len(some),
            "median_error": report.median([abs(row["error"]) for row in some]),
            "p90_error": float(np.quantile([abs(row["error"]) for row in some], 0.9)),
            "within_share": float(np.mean([row["within"] for row in some])),
        }


@report.benchmark("whatif", 3, shown=_SHOWN)
@click.option("--workload", "names", multiple=True, type=click.Choice(list(COUNTS)), help="Only this; repeatable.")
@click.option("--question", "questions", multiple=True, type=click.Choice(QUESTIONS), help="Only this; repeatable.")
@click.option("--seconds", type=click.FloatRange(min=0.05), default=1.0, show_default=True, help="Of an epoch, about.")
@click.option("--data", "folder", type=click.Path(file_okay=False, path_type=Path), help="Keep the files there.")
def main(
    quick: bool,
    repetitions: int,
    names: tuple[str, ...],
    questions: tuple[str, ...],
    seconds: float,
    folder: Path | None,
) -> Iterator[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    seconds = 0.1 if quick else seconds
    with ExitStack() as stack:
        where = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in names or tuple(COUNTS)[: 1 if quick else None]:
            data = isolated(written, name, where, 24 if quick else COUNTS[name], timeout_s=600.0)
            wanted = questions or QUESTIONS
            for row in workload_rows(data, wanted, repetitions, seconds, quick=quick):
                rows.append(row)
                yield row
    yield from summary(rows)


if __name__ == "__main__":
    main()
