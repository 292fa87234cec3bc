"""Pictures of a recorded comparison: ``python -m benchmarks.compare.plot FILE.json --out DIR``.

One picture for each workload: samples per second by step, one line for each loader, with the range of the repetitions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

Row = Mapping[str, Any]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture of one workload's rows."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for loader in dict.fromkeys(row["loader"] for row in rows):
        points = sorted((row["step_ms"], row) for row in rows if row["loader"] == loader and "samples_per_s" in row)
        steps = [step for step, _ in points]
        rates = [row["samples_per_s"] for _, row in points]
        low = [row["samples_per_s"] - row["samples_per_s_min"] for _, row in points]
        high = [row["samples_per_s_max"] - row["samples_per_s"] for _, row in points]
        ours = loader.startswith("minato_gpu")
        axes.errorbar(steps, rates, [low, high], label=loader, marker="o", capsize=3, linewidth=2 if ours else 1)
    axes.set(title=rows[0]["workload"], xlabel="emulated step, ms", ylabel="samples/s", ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


@click.command(help=__doc__)
@click.argument("source", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=".", show_default=True)
def main(source: Path, out: Path) -> None:
    rows: list[Row] = json.loads(source.read_text(encoding="utf-8"))["rows"]
    out.mkdir(parents=True, exist_ok=True)
    for workload in dict.fromkeys(row["workload"] for row in rows):
        path = out / f"compare_{workload}.png"
        draw([row for row in rows if row["workload"] == workload], path)
        click.echo(f"wrote {path}")


if __name__ == "__main__":
    main()
