"""What a GPU machine is needed for, in one go: ``python -m benchmarks.gpu_session``.

Parts run one after another, each in a process of its own with a time limit; the document is written after each of them,
so that what is known stays known. Correctness comes first: the tests that need a GPU, the parity of every pipeline,
then the figures:

    rates   = photographs, decoded, cropped, normalised, without a step: all-CPU, all-device and hybrid, in samples/s;
              hybrid_of_sum = hybrid / (all-CPU + all-device)
    thread  = what ``next`` takes of the training thread when its batch lies ready, and for how long the interpreter is
              taken from it while it computes (the longest gap of a loop that reads the clock, also without a loader)

Without a GPU the same code runs against the CPU stand-ins, which shows that it works; its figures mean nothing. Peers
and a real training step are not in it yet.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
import torch

from benchmarks import report
from benchmarks.report import progress
from minato_gpu import DataLoader, parity
from minato_gpu.demo.photographs import make
from minato_gpu.report import usable_cores
from minato_gpu.report import write as write_json
from pipelines import image_classification

ROOT = Path(__file__).parents[1]
MODULES = ("image_classification", "segmentation_3d", "object_detection", "speech_recognition")
LANES = (("cpu",), ("device",), ("cpu", "device"))
_COLUMNS = (
    "case",
    "name",
    "passed",
    "samples_per_s",
    "samples_per_s_spread",
    "hybrid_of_sum",
    "device_bytes_peak",
    "next_p50_s",
    "next_p99_s",
    "next_p999_s",
    "pause_p99_s",
    "pause_p999_s",
    "error",
)


@dataclass(frozen=True)
class Settings:
    """``device``: "cuda" or "cpu" (the stand-ins). ``quick``: toy size."""

    device: str
    quick: bool
    workers: int
    repetitions: int
    photographs: int
    batch: int
    size: int

    @classmethod
    def usual(cls, device: str, *, quick: bool) -> Settings:
        """The size of a real run, or of a toy."""
        if quick:
            return cls(device, quick, workers=1, repetitions=1, photographs=0, batch=4, size=32)
        workers = max(1, usable_cores() - 2)
        return cls(device, quick, workers, repetitions=5, photographs=2000, batch=256, size=224)


# --- parts -------------------------------------------------------------------------------------------------------


def tests(settings: Settings) -> list[dict[str, Any]]:
    """``pytest -m gpu``; where there is a GPU nothing may be skipped. At toy size one file, to show that it works."""
    required = ["--require-gpu"] if settings.device == "cuda" else []
    which = ["tests/memory/test_nvml.py"] if settings.quick else []
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *required, *which]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr[-200:]]
    return [{"name": "pytest -m gpu", "passed": done.returncode == 0, "summary": lines[-1]}]


def check(settings: Settings) -> list[dict[str, Any]]:
    """Every stage of every pipeline, on its module's example data."""
    rows = []
    for module in MODULES[: 1 if settings.quick else None]:
        found = parity.run_check(f"pipelines.{module}", None, settings.device)
        worst = [row["stage"] for row in found.rows if not row["passed"]]
        rows.append({"name": module, "passed": found.passed, "stages_failed": worst, "rows": found.rows})
    return rows


def rates(settings: Settings) -> list[dict[str, Any]]:
    """Samples per second of each lane alone and of both, over whole epochs after one that warms up."""
    rows: list[dict[str, Any]] = []
    with _photographs(settings) as data:
        for lanes in LANES:
            loader = _loader(settings, data, lanes)
            for _ in _on_device(settings, loader):
                pass
            found = [_rate(settings, loader) for _ in range(settings.repetitions)]
            stats = loader.stats()
            row = {"name": "+".join(lanes), **report.summarise("samples_per_s", found), "stats": stats}
            rows.append({**row, "device_bytes_peak": stats.get("device", {}).get("device_bytes_peak")})
            del loader
    by_name = {row["name"]: row["samples_per_s"] for row in rows}
    rows[-1]["hybrid_of_sum"] = by_name["cpu+device"] / (by_name["cpu"] + by_name["device"])
    return rows


def thread(settings: Settings) -> list[dict[str, Any]]:
    """What the training thread gives away."""
    steps, step_s = (20, 2e-3) if settings.quick else (2000, 20e-3)
    alone = [_longest_gap(step_s) for _ in range(steps)]
    gaps: list[float] = []
    nexts: list[float] = []
    with _photographs(settings) as data:
        loader = _loader(settings, data, ("cpu", "device"))
        while len(gaps) < steps:
            batches = iter(loader)
            while len(gaps) < steps:
                asked = perf_counter()
                batch = next(batches, None)
                if batch is None:
                    break
                nexts.append(perf_counter() - asked)
                gaps.append(_longest_gap(step_s))
        del batches, loader
    return [
        {"name": "without a loader", **_tail("pause", alone)},
        {"name": "hybrid", **_tail("pause", gaps), **_tail("next", nexts)},
    ]


PARTS: dict[str, tuple[Callable[[Settings], list[dict[str, Any]]], float]] = {
    "tests": (tests, 600.0),
    "parity": (check, 300.0),
    "rates": (rates, 600.0),
    "thread": (thread, 300.0),
}


# --- measuring ---------------------------------------------------------------------------------------------------


@contextmanager
def _photographs(settings: Settings) -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="minato_gpu_session_") as directory:
        folder = Path(directory) / "photographs"
        if settings.quick:
            image_classification.example_data(folder)
        else:
            make(folder, settings.photographs, 0)
        yield image_classification.dataset(folder)


def _loader(settings: Settings, data: Any, lanes: tuple[str, ...]) -> Any:
    return DataLoader(
        data,
        settings.batch,
        shuffle=True,
        num_workers=settings.workers,
        pipeline=image_classification.build(settings.size),
        device=settings.device if settings.device == "cuda" else None,
        lanes=lanes,
        in_order=False,
        persistent_workers=True,
    )


def _on_device(settings: Settings, loader: Any) -> Iterator[Any]:
    """The epoch's batches; ends when the device is through with the last."""
    yield from loader
    if settings.device == "cuda":
        torch.cuda.synchronize()


def _rate(settings: Settings, loader: Any) -> float:
    began = perf_counter()
    samples = sum(len(batch["label"]) for batch in _on_device(settings, loader))
    return samples / (perf_counter() - began)


def _longest_gap(seconds: float) -> float:
    """The longest time between two looks at the clock in a loop that does nothing else."""
    before = perf_counter()
    end, longest = before + seconds, 0.0
    while before < end:
        now = perf_counter()
        longest = max(longest, now - before)
        before = now
    return longest


def _tail(name: str, values: list[float]) -> dict[str, float]:
    p50, p99, p999 = np.percentile(values, [50, 99, 99.9])
    return {f"{name}_p50_s": float(p50), f"{name}_p99_s": float(p99), f"{name}_p999_s": float(p999)}


# --- the session -------------------------------------------------------------------------------------------------


def session(settings: Settings, parts: tuple[str, ...], path: Path) -> list[dict[str, Any]]:
    """Run the parts; the document at ``path`` is whole after each. A part that fails or takes too long is a row."""
    rows: list[dict[str, Any]] = []
    for name in parts:
        progress(f"{name} ...")
        rows += [{"case": name, **row} for row in _part(name, settings)]
        content = report.document("gpu_session", {**asdict(settings), **_provenance(settings)}, rows)
        write_json(content, path)
    return rows


def _part(name: str, settings: Settings) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.gpu_session", "--part", name, "--device", settings.device]
    command += ["--quick"] if settings.quick else []
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PARTS[name][1])
    except subprocess.TimeoutExpired:
        return [{"name": name, "passed": False, "error": f"took longer than {PARTS[name][1]:.0f} s"}]
    if done.returncode:
        return [{"name": name, "passed": False, "error": done.stderr.strip()[-2000:]}]
    rows: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return rows


def _provenance(settings: Settings) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    cuda = torch.version.cuda if settings.device == "cuda" else None
    return {"commit": commit.stdout.strip() or None, "cuda": cuda, "ended": datetime.now(UTC).isoformat()}


def _default_path(settings: Settings) -> Path:
    if settings.device != "cuda" or settings.quick:
        return ROOT / "runs" / "gpu_session.json"
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    return ROOT / "benchmarks" / "results" / name / f"{datetime.now(UTC):%Y-%m-%d}.json"


@click.command(help=__doc__)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="The GPU where there is one, if not given.")
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="Leave the other parts out.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the document goes.")
@click.option("--quick", is_flag=True, help="Toy size: shows that it works; the figures mean nothing.")
@click.option("--part", type=click.Choice(list(PARTS)), hidden=True)
def main(device: str | None, only: tuple[str, ...], out: Path | None, quick: bool, part: str | None) -> None:
    """See the module's head."""
    settings = Settings.usual(device or ("cuda" if torch.cuda.is_available() else "cpu"), quick=quick)
    if part is not None:
        click.echo(json.dumps(PARTS[part][0](settings), default=float))
        return
    path = out or _default_path(settings)
    rows = session(settings, only or tuple(PARTS), path)
    report.print_table("gpu session", rows, _COLUMNS)
    progress(f"written to {path}")
    if any(row.get("passed") is False for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
