"""The demonstration from the data set to the summary: a flat row for each epoch, and the whole document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console

from minato_gpu.lab import report
from minato_gpu.lab.console import show
from minato_gpu.lab.demo import photographs, picture
from minato_gpu.lab.demo.training import LANES, Tally, train
from minato_gpu.samples import JSON


def run(
    *, console: Console, data: Path | None, epochs: int, out: Path, size: int, batch_size: int, workers: int, seed: int
) -> dict[str, JSON]:
    """Trains on ``data`` (None: on ``size`` photographs made in ``out``), and shows and leaves the results in ``out``.

    Returns the document that it wrote to ``summary.json``.
    """
    device = "cuda" if torch.cuda.is_available() else None
    folder = data if data is not None else _made(console, out / "data", size, seed)
    settings = {"epochs": epochs, "batch_size": batch_size, "workers": workers, "seed": seed}
    console.print(f"training: epochs {epochs}, cpu lane of {workers} workers, device lane on {device or 'the CPU'}")
    with console.status("training"):
        tallies, stats, timelines = zip(*train(folder, **settings, device=device), strict=True)
    made = size if data is None else None
    said = {"command": "demo", "photographs_made": made, **settings, "device": device or "cpu"}
    document = summary(tallies, stats, said)
    out.mkdir(parents=True, exist_ok=True)
    report.write(document, out / "summary.json")
    samples = f"{document['samples_expected'] // epochs:,}"
    picture.draw(timelines, out / "timeline.png", f"How the loader spent its time on {samples} photographs")
    show(console, "What the loader did", document["rows"])
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
    """The JSON document of a run: ``rows``, one for each epoch, the totals over all epochs, and the loader's ``stats``.

    ``samples_delivered`` is counted by the training loop, ``samples_by_lane`` by the loader.
    """
    rows = [epoch_row(*each) for each in zip(tallies, stats, strict=True)]
    delivered = sum(row["samples_delivered"] for row in rows)
    elapsed = sum(row["elapsed_s"] for row in rows)
    return report.document(
        settings,
        rows,
        samples_expected=sum(int(tally.expected.sum()) for tally in tallies),
        samples_delivered=delivered,
        samples_by_lane={lane: sum(row[f"samples_{lane}_lane"] for row in rows) for lane in LANES},
        every_sample_once=all(tally.complete for tally in tallies),
        samples_per_s=delivered / elapsed,
        first_batch_s=rows[0]["first_batch_s"],
        final_loss=rows[-1]["loss"],
        stats=list(stats),
    )


def epoch_row(tally: Tally, stats: Mapping[str, JSON]) -> dict[str, JSON]:
    """Returns an epoch's row. Loss and accuracy are those of training, on augmented crops, as the model learns."""
    return {
        "epoch": tally.epoch,
        "samples_delivered": tally.samples,
        **{f"samples_{lane}_lane": stats["lanes"].get(lane, {}).get("samples", 0) for lane in LANES},
        "elapsed_s": tally.elapsed_s,
        "samples_per_s": tally.samples / tally.elapsed_s,
        "first_batch_s": stats["first_batch_s"],
        **{f"wait_{name}_s": stats["wait_s"][name] for name in ("total", "p99")},
        **{f"busy_share_{lane}_lane": stats["lanes"].get(lane, {}).get("busy_share") for lane in LANES},
        "prediction_log_sigma": stats["prediction"]["log_sigma"],
        "peak_in_flight_bytes": stats["bytes_in_flight_peak"],
        "loss": tally.loss,
        "accuracy": tally.accuracy,
    }
