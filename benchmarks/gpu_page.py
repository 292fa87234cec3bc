"""The tables of MEASUREMENTS.md that are made from the documents of GPU sessions (``gpu_session``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

PAGES: Mapping[str, Sequence[str]] = {
    "benchmarks/MEASUREMENTS.md": ("gpu", "gpu_decoding"),
}
"""Which page shows which tables."""

_NAMES = {
    "hybrid": "this loader, both lanes",
    "device": "this loader, device lane",
    "cpu": "this loader, CPU lane",
    "dali_dynamic": "DALI, dynamic mode",
    "dali": "DALI, pipeline",
    "dali_cpu": "DALI, CPU operators, pipeline",
    "torchvision": "PyTorch, torchvision's nvJPEG",
    "pytorch": "PyTorch, the rest on the GPU",
    "spdl": "SPDL, the rest on the GPU",
}
_VERSIONS = {
    "python": "Python",
    "torch": "PyTorch",
    "nvidia-dali-cuda130": "DALI",
    "nvidia-nvimgcodec-cu13": "nvImageCodec",
    "nvidia-nvjpeg": "nvJPEG",
}


def described(document: Row) -> str:
    """Date, machine, commit, driver and versions in a line."""
    machine, versions, settings = document["machine"], document["versions"], document["settings"]
    named = ", ".join(f"{name} {versions[key]}" for key, name in _VERSIONS.items() if key in versions)
    gpus = ", ".join(str(gpu) for gpu in machine["gpus"])
    return (
        f"{document['date']}, {gpus}, driver {settings['driver']}, {machine['cores']} cores of {machine['processor']}; "
        f"{named}; commit {settings['commit']}"
    )


def rows_of(name: str, document: Row) -> list[dict[str, Any]]:
    """The table's rows; none where the session has answered nothing that it shows."""
    rows = document["rows"]
    if name == "gpu_decoding":
        return [{**row, "cpu_ms": 1e3 * row["cpu_s_per_sample"]} for row in _measured(rows, "probe").values()]
    rates, training = _measured(rows, "rates"), _measured(rows, "training")
    return [
        _loader(key, rates.get(key, {}), training.get(key, {})) for key in _NAMES if key in rates or key in training
    ]


def _loader(name: str, rate: Row, trained: Row) -> dict[str, Any]:
    """One loader without steps and with them."""
    row = {key: rate.get(key) for key in ("samples_per_s", "cores_busy", "jpeg_engine_busy")}
    row |= {"loader": _NAMES[name], "trained_per_s": trained.get("samples_per_s")}
    row["runs"] = f"{rate.get('repetitions', '-')}, {trained.get('repetitions', '-')}"
    for key in ("step", "resident_step"):
        row[f"{key}_ms"] = None if trained.get(f"{key}_s") is None else 1e3 * trained[f"{key}_s"]
    return row | {"step_slowdown": trained.get("step_slowdown")}


def _measured(rows: Sequence[Row], case: str) -> dict[str, Row]:
    return {str(row["name"]): row for row in rows if row["case"] == case and "samples_per_s" in row}
