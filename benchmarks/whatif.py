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

Bottleneck is *slept*: as long as each sample costs when it is prepared alone, times a factor that makes an epoch of two
workers as long as ``--seconds``. So there can be more workers than cores, and what other processes of the machine do
disturbs little. With ``--computed`` it is done, as long as there are as many cores as workers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import click
import numpy as np

from benchmarks import report
from benchmarks.compare.workloads import INDEX
from benchmarks.isolate import isolated
from benchmarks.throttle import Throttle, server
from benchmarks.turns import in_turns
from benchmarks.whatif_profile import Beyond, measured_storage, profile_of, profile_ways
from benchmarks.whatif_run import Data, Measured, Stored, Way, measure, written
from benchmarks.whatif_settings import QUESTIONS, Around, Point, asked, points
from minato_gpu.lab import report as plain_report
from minato_gpu.lab.analysis.predict import Prediction, Predictor
from minato_gpu.lab.analysis.profile import Profile
from minato_gpu.samples import sample_seed
from minato_gpu.sampling.lookahead import DistributedOrders

COUNTS = {"image_classification": 384, "object_detection": 256, "segmentation_3d": 160, "speech_recognition": 256}
WORKERS = 2
_COLUMNS = ("question", "setting", "predicted_s", "measured_s", "spread_s", "error", "within", "failed")
_ALLOWED = 0.04


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
    kept: Path | None,
    computed: bool,
    quick: bool,
) -> Iterator[dict[str, Any]]:
    """A row for each setting of each question."""
    with server(Throttle(), 0, folder=data.folder) as address:
        costs = np.array(isolated(costs_alone, data, timeout_s=600.0))
        if not computed:
            costs *= WORKERS * seconds / costs.sum()
        slept = () if computed else tuple(costs.tolist())
        base = Way(WORKERS, slept=slept, epochs=1 if quick else 3)
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
        if kept is not None:
            plain_report.write(asdict(profile), kept / f"{data.name}.json")
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


@click.command(help=__doc__)
@report.command
@click.option("--workload", "names", multiple=True, type=click.Choice(list(COUNTS)), help="Only this; repeatable.")
@click.option("--question", "questions", multiple=True, type=click.Choice(QUESTIONS), help="Only this; repeatable.")
@click.option("--seconds", type=click.FloatRange(min=0.05), default=1.0, show_default=True, help="Of an epoch, about.")
@click.option("--computed", is_flag=True, help="Prepare samples, instead of sleeping as long.")
@click.option("--profiles", "kept", type=click.Path(path_type=Path), help="Leave what was measured before there.")
@click.option("--data", "folder", type=click.Path(file_okay=False, path_type=Path), help="Keep the files there.")
def main(
    json_path: str | None,
    quick: bool,
    repetitions: int | None,
    names: tuple[str, ...],
    questions: tuple[str, ...],
    seconds: float,
    computed: bool,
    kept: Path | None,
    folder: Path | None,
) -> None:
    repetitions = repetitions or (1 if quick else 3)
    begin = perf_counter()
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        where = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in names or (tuple(COUNTS)[:1] if quick else tuple(COUNTS)):
            data = isolated(written, name, where, 24 if quick else COUNTS[name], report.progress, timeout_s=600.0)
            wanted = questions or QUESTIONS
            rows += workload_rows(
                data, wanted, repetitions, 0.1 if quick else seconds, kept=kept, computed=computed, quick=quick
            )
    rows += summary(rows)
    settings = {
        "preparation": "computed" if computed else "emulated: slept",
        "repetitions": repetitions,
        "cores_busy_before": os.getloadavg()[0],
        "elapsed_s": perf_counter() - begin,
        "quick": quick,
    }
    columns = (*_COLUMNS, "points", "median_error", "p90_error", "within_share")
    report.publish(report.document("whatif", settings, rows), json_path, columns)
    if any("failed" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
