"""The demonstration from the data set to the summary: a flat row for each epoch, and the whole document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from minato_gpu.lab import report
from minato_gpu.lab.console import show
from minato_gpu.lab.demo import photographs, picture
from minato_gpu.lab.demo.training import LANES, Tally, TrainingSettings, train
from minato_gpu.samples import JSON

_SHOWN = (
    *("epoch", "samples_delivered", "samples_cpu_lane", "samples_device_lane", "elapsed_s", "samples_per_s"),
    *("first_batch_s", "wait_total_s", "wait_p99_s", "busy_share_cpu_lane", "busy_share_device_lane"),
    *("prediction_log_sigma", "peak_in_flight_bytes", "loss", "accuracy"),
)


def run(
    *,
    console: Console,
    data: Path | None,
    epochs: int,
    out: Path,
    size: int,
    batch_size: int,
    workers: int,
    seed: int,
) -> dict[str, JSON]:
    """Trains on ``data`` (None: on ``size`` photographs made in ``out``), and shows and leaves the results in ``out``.

    Returns the document that it wrote to ``summary.json``.
    """
    device = "cuda" if torch.cuda.is_available() else None
    folder = data if data is not None else _made(console, out / "data", size, seed)
    settings = TrainingSettings(folder, epochs, batch_size, workers=workers, seed=seed, device=device)
    console.print(f"training: epochs {epochs}, cpu lane of {workers} workers, device lane on {device or 'the CPU'}")
    with console.status("training"):
        tallies, stats, timelines = zip(*train(settings), strict=True)
    said = {"command": "demo", "photographs_made": size if data is None else None, **asdict(settings)}
    del said["data"]  # a path of the user's
    document = summary(tallies, stats, said | {"device": device or "cpu"})
    out.mkdir(parents=True, exist_ok=True)
    report.write(document, out / "summary.json")
    samples = f"{document['samples_expected'] // epochs:,}"
    picture.draw(timelines, out / "timeline.png", f"How the loader spent its time on {samples} photographs")
    show(console, "What the loader did", document["rows"], _SHOWN)
    console.print(f"left {out / 'summary.json'} and {out / 'timeline.png'}")
    return document


def _made(console: Console, folder: Path, count: int, seed: int) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with console.status("making photographs"):
        manifest = photographs.make(folder, count, seed)
    smallest, largest = manifest["smallest_pixels"] / 1e6, manifest["largest_pixels"] / 1e6
    console.print(
        f"{manifest['files']} photographs of {smallest:.2f} to {largest:.1f} megapixels, "
        f"{manifest['bytes'] / 1e6:.0f} MB, in {folder}"
    )
    return folder


def summary(
    tallies: Sequence[Tally], stats: Sequence[Mapping[str, JSON]], settings: Mapping[str, JSON]
) -> dict[str, JSON]:
    """The JSON document of a run, with the totals over all epochs beside ``rows``, one row for each epoch.

    ``samples_delivered`` is counted by the training loop, ``samples_by_lane`` by the loader.
    """
    rows = [epoch_row(*each) for each in zip(tallies, stats, strict=True)]
    delivered = sum(row["samples_delivered"] for row in rows)
    elapsed = sum(row["elapsed_s"] for row in rows)
    return report.document(
        settings,
        rows,
        samples_expected=sum(row["samples_expected"] for row in rows),
        samples_delivered=delivered,
        samples_by_lane={lane: sum(row[f"samples_{lane}_lane"] for row in rows) for lane in LANES},
        every_sample_once=all(tally.complete for tally in tallies),
        samples_per_s=delivered / elapsed if elapsed else None,
        first_batch_s=rows[0]["first_batch_s"],
        final_loss=rows[-1]["loss"],
        final_accuracy=rows[-1]["accuracy"],
        stalls=[each["stalls"] for each in stats],
        longest_waits=[each["longest_waits"] for each in stats],
    )


def epoch_row(tally: Tally, stats: Mapping[str, JSON]) -> dict[str, JSON]:
    """Returns an epoch's row. Loss and accuracy are those of training, on augmented crops, as the model learns."""
    prediction = stats["prediction"]
    row = {
        "epoch": tally.epoch,
        "samples_expected": int(tally.expected.sum()),
        "samples_delivered": tally.samples,
        "samples_failed": stats["samples_failed"],
        "samples_repeated": stats["samples_repeated"],
        "elapsed_s": tally.elapsed_s,
        "samples_per_s": tally.samples / tally.elapsed_s if tally.elapsed_s else None,
        "first_batch_s": stats["first_batch_s"],
        "loss": tally.loss,
        "accuracy": tally.accuracy,
        **{f"wait_{name}_s": stats["wait_s"][name] for name in ("p50", "p95", "p99", "total")},
        **{f"prediction_{name}": prediction[name] for name in ("samples", "log_sigma", "rank_correlation")},
        "peak_in_flight_bytes": stats["bytes_in_flight_peak"],
    }
    for lane in LANES:
        known = stats["lanes"].get(lane, {})
        row[f"samples_{lane}_lane"] = known.get("samples", 0)
        row[f"busy_share_{lane}_lane"] = known.get("busy_share")
        row[f"slots_{lane}_lane"] = known.get("slots")
    return row
