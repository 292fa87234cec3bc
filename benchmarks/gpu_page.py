"""The tables of MEASUREMENTS.md that are made from the documents of GPU sessions (``gpu_session``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import report

Row = Mapping[str, Any]

PAGES: Mapping[str, Sequence[str]] = {
    "benchmarks/MEASUREMENTS.md": ("gpu", "gpu_tuned", "gpu_decoding", "gpu_checks"),
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
_CASES = {"gpu": ("rates", "training"), "gpu_tuned": ("tune",), "gpu_decoding": ("probe",), "gpu_checks": ("checks",)}
_OF_CHECKS = ("name", "case", "holds", "means", "error", "missing", "said")


def described(document: Row) -> str:
    """Date, machine, commit, driver and versions in a line."""
    machine, versions, settings = document["machine"], document["versions"], document["settings"]
    named = ", ".join(f"{name} {versions[key]}" for key, name in _VERSIONS.items() if key in versions)
    gpus = ", ".join(str(gpu) for gpu in machine["gpus"])
    return (
        f"{document['date']}, {gpus}, driver {settings['driver']}, {machine['cores']} cores of {machine['processor']}; "
        f"{named}; commit {settings['commit']}"
    )


def has(name: str, document: Row) -> bool:
    """Whether the session has answered anything that the table shows."""
    return any(row["case"] in _CASES[name] and ("samples_per_s" in row or "holds" in row) for row in document["rows"])


def table(name: str, document: Row) -> str:
    """A Markdown table from the session's rows."""
    return _TABLES[name](document["rows"])


def _loaders(rows: Sequence[Row]) -> str:
    rates, training = _measured(rows, "rates"), _measured(rows, "training")
    titles = (
        "loader",
        "samples/s",
        "cores busy",
        "JPEG engine busy",
        "with ResNet-50",
        "runs",
        "step, ms",
        "without a loader",
        "slower by",
    )
    cells = []
    for name in _NAMES:
        rate, trained = rates.get(name), training.get(name)
        if rate is None and trained is None:
            continue
        cells.append(
            [
                _NAMES[name],
                _number(rate, "samples_per_s", "{:,.0f}"),
                _number(rate, "cores_busy", "{:.1f}"),
                _number(rate, "jpeg_engine_busy", "{:.0f} %", 100.0),
                _number(trained, "samples_per_s", "{:,.0f}"),
                f"{_number(rate, 'repetitions', '{}')}, {_number(trained, 'repetitions', '{}')}",
                _number(trained, "step_s", "{:.1f}", 1e3),
                _number(trained, "resident_step_s", "{:.1f}", 1e3),
                _number(trained, "step_slowdown", "{:.1f} %", 100.0),
            ]
        )
    return report.markdown_table(titles, cells)


def _tuned(rows: Sequence[Row]) -> str:
    found = _measured(rows, "tune")
    cells = [[_NAMES[n], f"{row['samples_per_s']:,.0f}", str(len(row["tried"]))] for n, row in found.items()]
    return report.markdown_table(("loader", "samples/s", "settings tried"), cells)


def _decoding(rows: Sequence[Row]) -> str:
    found = _measured(rows, "probe")
    titles = ("decoded", "samples/s", "CPU a sample, ms", "levels, at most", "on average", "wrong beside other work")
    cells = [
        [
            name,
            f"{row['samples_per_s']:,.0f}",
            f"{1e3 * row['cpu_s_per_sample']:.2f}",
            f"{row['max_levels']:.2f}",
            f"{row['mean_levels']:.2f}",
            str(row["wrong_while_busy"]),
        ]
        for name, row in found.items()
    ]
    return report.markdown_table(titles, cells)


def _checks(rows: Sequence[Row]) -> str:
    cells = [[row["name"], _answer(row), _figures(row)] for row in rows if row["case"] == "checks"]
    return report.markdown_table(("whether", "answer", "figures"), cells)


def _answer(row: Row) -> str:
    if "holds" in row:
        return "yes" if row["holds"] else "**no**"
    why = str(row.get("missing") or row.get("error")).strip().splitlines()[-1]
    return f"not known: {why}"


def _figures(row: Row) -> str:
    shown = {name: value for name, value in row.items() if name not in _OF_CHECKS}
    return ", ".join(f"{name} {_short(value)}" for name, value in shown.items())


def _short(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "yes" if value is True else "no" if value is False else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.2g}"


def _measured(rows: Sequence[Row], case: str) -> dict[str, Row]:
    return {str(row["name"]): row for row in rows if row["case"] == case and "samples_per_s" in row}


def _number(row: Row | None, key: str, form: str, times: float = 1) -> str:
    return "-" if row is None or row.get(key) is None else form.format(times * row[key] if times != 1 else row[key])


_TABLES = {"gpu": _loaders, "gpu_tuned": _tuned, "gpu_decoding": _decoding, "gpu_checks": _checks}
