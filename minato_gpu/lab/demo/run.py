"""The demonstration from the data set to the summary."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from minato_gpu.lab import report
from minato_gpu.lab.console import show
from minato_gpu.lab.demo import photographs, picture, summary
from minato_gpu.lab.demo.training import TrainingSettings, train
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
    """Trains on ``data`` (or on ``size`` photographs made in ``out``), shows it, and leaves the results in ``out``.

    Returns the document that it wrote to ``summary.json``.
    """
    device = "cuda" if torch.cuda.is_available() else None
    folder = data if data is not None else _made(console, out / "data", size, seed)
    settings = TrainingSettings(folder, epochs, batch_size, workers=workers, seed=seed, device=device)
    console.print(f"training: epochs {epochs}, cpu lane of {workers} workers, device lane on {device or 'the CPU'}")
    with console.status("training"):
        outcome = train(settings)
    document = summary.document(outcome, _said(settings, size if data is None else None))
    out.mkdir(parents=True, exist_ok=True)
    report.write(document, out / "summary.json")
    samples = f"{document['samples_expected'] // epochs:,}"
    picture.draw(outcome.timelines, out / "timeline.png", f"How the loader spent its time on {samples} photographs")
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


def _said(settings: TrainingSettings, made: int | None) -> dict[str, JSON]:
    """The settings as they go into the document: without the path of the user's data."""
    said = {"command": "demo", "photographs_made": made, **asdict(settings), "device": settings.device or "cpu"}
    del said["data"]
    return said
