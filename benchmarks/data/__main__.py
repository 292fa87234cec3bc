"""Make a data set for a workload: ``python -m benchmarks.data WORKLOAD --out DIR --size N``.

The files are in the workload's real format and made from photographs, voices and volumes that installed packages ship.
Their sizes are chosen on this machine, by trying a few, so that the samples' costs are spread as the MinatoLoader paper
measured them; what came of it is measured and printed beside the published ratios. Exit status 1 where one of them is
off by more than the tolerance.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import report
from benchmarks.data import detection, speech, volumes
from benchmarks.data.published import RATIOS, SPREADS, costs, measured
from minato_gpu import Pipeline
from minato_gpu.lab.demo.photographs import make
from pipelines import image_classification, object_detection, segmentation_3d, speech_recognition

TOLERANCE = 0.15
_MEASURED = 600  # samples that are measured, at most


@dataclass(frozen=True)
class Workload:
    """How its data are written, and what prepares a sample of them."""

    write: Callable[[Path, int], Iterator[int]]
    dataset: Callable[[Path], Any]
    pipeline: Callable[[Path], Pipeline]


def photographs(directory: Path, count: int) -> Iterator[int]:
    """Write the demonstration's photographs, whose sizes are log-normal from 0.05 to 12 megapixels; yields ``count``
    when all are done. No spread of cost is published for them. Raises DataSetError for fewer than 15."""
    directory.rmdir()  # ``make`` moves a finished folder into its place
    make(directory, count, 0)
    yield count


WORKLOADS: dict[str, Workload] = {
    "image_classification": Workload(
        photographs, image_classification.dataset, lambda _: image_classification.pipeline()
    ),
    "object_detection": Workload(detection.write, object_detection.dataset, lambda _: object_detection.pipeline()),
    "segmentation_3d": Workload(volumes.write, segmentation_3d.dataset, lambda _: volumes.pipeline()),
    "speech_recognition": Workload(speech.write, speech_recognition.dataset, speech.pipeline),
}


def table(name: str, directory: Path) -> list[dict[str, Any]]:
    """A row for each ratio: published, measured on these data, and how far off."""
    workload = WORKLOADS[name]
    dataset, pipeline = workload.dataset(directory), workload.pipeline(directory)
    step = -(-len(dataset) // _MEASURED)
    seconds = costs(dataset, pipeline, range(0, len(dataset), step))
    ratios = measured(seconds)
    published = SPREADS[name].ratios if name in SPREADS else {}
    rows: list[dict[str, Any]] = [{"ratio_to_median": "median", "measured_s": report.median(seconds.tolist())}]
    for ratio in RATIOS:
        row: dict[str, Any] = {"ratio_to_median": ratio, "measured": ratios[ratio]}
        if published:
            row |= {"published": published[ratio], "off": ratios[ratio] / published[ratio] - 1}
        rows.append(row)
    return rows


@click.command(help=__doc__)
@click.argument("name", metavar="WORKLOAD", type=click.Choice(list(WORKLOADS)))
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="A new or empty folder.")
@click.option("--size", type=click.IntRange(min=16), default=600, show_default=True, help="How many samples.")
@report.json_option
def main(name: str, out: Path, size: int, json_path: str | None) -> None:
    if out.exists() and any(out.iterdir()):
        raise click.UsageError(f"--out {out} is not empty; name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    with click.progressbar(WORKLOADS[name].write(out, size), length=size, label=name, file=sys.stderr) as done:
        for _ in done:
            pass
    rows = [{"workload": name, **row} for row in table(name, out)]
    settings = {"workload": name, "size": size, "tolerance": TOLERANCE}
    report.publish(
        report.document("data", settings, rows),
        json_path,
        ("ratio_to_median", "measured_s", "published", "measured", "off"),
    )
    wrong = [row["ratio_to_median"] for row in rows if abs(row.get("off", 0.0)) > TOLERANCE]
    if wrong:
        raise click.ClickException(
            f"off by more than {TOLERANCE:.0%}: {', '.join(wrong)}; try again, or a larger --size"
        )


if __name__ == "__main__":
    main()
