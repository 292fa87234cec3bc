"""The page of a recorded comparison: ``python -m benchmarks.compare.plot FOLDER --out benchmarks/COMPARISON.md``.

``FOLDER`` holds what ``python -m benchmarks.compare WORKLOAD --json FOLDER/compare_WORKLOAD.json`` left. For each
workload the page has a picture (written beside the results), a table of every case, and the settings that were chosen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import report
from benchmarks.compare.ratios import OURS
from benchmarks.compare.summary import ratio
from benchmarks.readme import described
from minato_gpu.extras import from_extra

Row = Mapping[str, Any]

_TABLE: tuple[tuple[str, str, str], ...] = (
    ("loader", "loader", "{}"),
    ("samples_per_s", "samples/s", "{:,.1f}"),
    ("efficiency", "efficiency", "{:.3f}"),
    ("au", "AU", "{:.3f}"),
    ("first_batch_s", "first batch, s", "{:.3f}"),
    ("epoch_gap_s", "epoch gap, s", "{:.3f}"),
    ("wait_p50_s", "wait p50, s", "{:.4f}"),
    ("wait_p95_s", "p95, s", "{:.4f}"),
    ("wait_p99_s", "p99, s", "{:.4f}"),
    ("cpu_s_per_sample", "CPU s/sample", "{:.4f}"),
    ("peak_pss_bytes", "peak PSS, MB", "{:,.0f}"),
    ("lateness_max", "latest, batches", "{:.0f}"),
)
_TITLES = [title for _, title, _ in _TABLE] + ["to the best peer (95 %)", "CPU to the thriftiest peer (95 %)"]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture of one workload: bars of samples/s with the range of the repetitions, a panel for each case."""
    with from_extra("bench"):
        from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row["case"] for row in rows))
    loaders = list(dict.fromkeys(row["loader"] for row in rows))[::-1]
    figure = Figure(figsize=(2 + 4 * len(cases), 5), layout="constrained")
    panels = figure.subplots(1, len(cases), sharey=True, squeeze=False)
    for axes, case in zip(panels[0], cases, strict=True):
        shown = [row for row in rows if row["case"] == case and "samples_per_s" in row]
        rates = [row["samples_per_s"] for row in shown]
        off = [
            [row["samples_per_s"] - row["samples_per_s_min"] for row in shown],
            [row["samples_per_s_max"] - row["samples_per_s"] for row in shown],
        ]
        colours = ["tab:orange" if row["loader"].startswith(OURS) else "tab:blue" for row in shown]
        places = [loaders.index(row["loader"]) for row in shown]
        axes.barh(places, rates, xerr=off, color=colours, capsize=2)
        axes.set(title=case.removeprefix(f"{rows[0]['workload']}, "), xlabel="samples/s")
        axes.set_yticks(range(len(loaders)), loaders)
    figure.suptitle(rows[0]["workload"])
    figure.savefig(path, dpi=100)


def section(document: Mapping[str, Any], picture: str) -> str:
    """The Markdown of one workload's document; ``picture`` is the path of its picture from the page."""
    rows = document["rows"]
    name = rows[0]["workload"]
    settings = document["settings"]
    warm_ups = settings.get("warm_ups", 1)
    size = f"batches of {rows[0]['batch_size']}, {rows[0]['samples']} samples in {settings['epochs']} timed epoch(s)"
    lines = [
        f"## {name}",
        "",
        f"{described(document)}; {size} after {warm_ups} to warm up, {settings['repetitions']} repetitions (medians).",
        "",
        f"![samples per second by loader]({picture})",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        chosen = [row for row in rows if row["case"] == case]
        lines += ["", f"### {case}", "", report.markdown_table(_TITLES, map(_cells, chosen))]
    lines += ["", "Settings: the fastest of those that were tried without a step.", ""]
    seen = {row["loader"]: row.get("loader_settings", "failed") for row in rows}
    return "\n".join([*lines, *(f"- {loader}: {text}" for loader, text in seen.items()), ""])


def _cells(row: Row) -> list[str]:
    if "samples_per_s" not in row:
        return [row["loader"], "failed", *[""] * (len(_TITLES) - 2)]
    scaled = {**row, "peak_pss_bytes": row.get("peak_pss_bytes", float("nan")) / 1e6}
    cells = [form.format(scaled[key]) for key, _, form in _TABLE]
    return [*cells, ratio(row, "ratio_to_peer") or "", ratio(row, "cpu_ratio_to_peer") or ""]


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("benchmarks/COMPARISON.md"))
def main(folder: Path, out: Path) -> None:
    files = sorted(folder.glob("compare_*.json"))
    if not files:
        raise click.UsageError(f"{folder} holds no compare_*.json")
    text = [_HEAD]
    for file in files:
        document = json.loads(file.read_text(encoding="utf-8"))
        picture = file.with_suffix(".png")
        draw(document["rows"], picture)
        text.append(section(document, os.path.relpath(picture, out.parent)))
    out.write_text("\n".join(text), encoding="utf-8")
    click.echo(f"wrote {out} and {len(files)} pictures")


_HEAD = """# The workloads, every loader

Made by `python -m benchmarks.compare.plot FOLDER` from what `python -m benchmarks.compare` recorded; what the columns
mean is said in `benchmarks/compare/__main__.py`, how each loader is driven in `benchmarks/peers/` and
`benchmarks/compare/`. Steps are emulated by waiting. DALI runs its CPU operators. "To the best peer" is the ratio of
samples/s to those of the fastest peer in the same order (in order, or out of order), paired by repetition.
"""


if __name__ == "__main__":
    main()
