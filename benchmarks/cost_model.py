"""How well the cost model predicts, by itself: real photographs, one at a time, with nothing else running.

The photographs are the demonstration's (0.05 to 12 megapixels), the pipeline is ``pipelines.image_classification``, and
every epoch draws other crops, as in training. Each sample's cost is predicted from its header and from what it cost in
the epoch before, then the sample is prepared and timed, then the model learns. ``log_sigma`` is the standard deviation
of log(actual / predicted); in a running loader, contention for the cores comes on top.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import report
from minato_gpu.device.executor import DeviceExecutor
from minato_gpu.lab.demo import photographs
from minato_gpu.samples import sample_seed
from minato_gpu.scheduling.costs import CostModel
from pipelines import image_classification

_COLUMNS = ("lane", "epoch", "samples", "log_sigma", "rank_correlation", "mean_s", "max_to_median")
_SEED = 5

Prepare = Callable[[Mapping[str, Any], int], object]
"""Does a lane's part of a sample: from the fields of the host read and the sample's seed."""


@click.command(help=__doc__)
@report.command
def main(json_path: str | None, quick: bool, repetitions: int | None) -> None:
    count, epochs = (40 if quick else 960), repetitions or 2
    pipeline = image_classification.build()
    first, stop = pipeline.host_prefix, len(pipeline.stages)
    executor = DeviceExecutor(pipeline, first, stop, device="cpu", max_batch=1, threads=1)
    lanes: dict[str, Prepare] = {
        "cpu": lambda fields, seed: pipeline.run(fields, seed, start=first),
        "device": lambda fields, seed: executor.run([(fields, seed)]),
    }
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="minato-gpu-") as folder:
        photographs.make(Path(folder) / "data", count, 0)
        data = image_classification.ImageFolder(Path(folder) / "data")
        model = CostModel(tuple(lanes), len(pipeline.feature_names), len(data))
        fields = pipeline.run(data[0], 0, stop=first)
        for prepare in lanes.values():  # libraries are loaded and DALI's graph is built
            prepare(fields, 0)
        for epoch in range(epochs):
            spent = _epoch(epoch, data, pipeline, lanes, model)
            for lane, seconds in spent.items():
                figures = {"mean_s": float(np.mean(seconds)), "max_to_median": max(seconds) / float(np.median(seconds))}
                rows.append({"lane": lane, "epoch": epoch + 1, **model.report(lane), **figures})
            report.progress(f"epoch {epoch + 1} of {epochs}")
    executor.close()
    settings = {"photographs": count, "epochs": epochs, "quick": quick, "device": "DALI's CPU operators, one thread"}
    report.publish(report.document("cost_model", settings, rows), json_path, _COLUMNS)


def _epoch(
    epoch: int, data: Any, pipeline: Any, lanes: Mapping[str, Prepare], model: CostModel
) -> dict[str, list[float]]:
    """Every photograph once on every lane, in random order; the seconds that they took."""
    model.reset_report()
    spent: dict[str, list[float]] = {lane: [] for lane in lanes}
    for index in np.random.default_rng(epoch).permutation(len(data)).tolist():
        seed = sample_seed(_SEED, epoch, index)
        fields = pipeline.run(data[index], seed, stop=pipeline.host_prefix)
        features = pipeline.features(fields)
        for lane, prepare in lanes.items():
            model.predict(lane, [features], [index])
            start = time.perf_counter()
            prepare(fields, seed)
            seconds = time.perf_counter() - start
            spent[lane].append(seconds)
            model.observe_many(lane, [index], [features], [seconds])
    return spent


if __name__ == "__main__":
    main()
