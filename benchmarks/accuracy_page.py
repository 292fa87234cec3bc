"""The page of a recorded ``benchmarks.accuracy``: ``python -m benchmarks.accuracy_page FILE``.

The picture is written beside the recorded file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import report
from benchmarks.readme import described
from minato_gpu.extras import from_extra

Row = Mapping[str, Any]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Final accuracy by loader and seed; and how many slow samples batches held, beside what chance makes of it."""
    with from_extra("bench"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for seed, accuracies in enumerate(zip(*(row["accuracies"] for row in rows), strict=True)):
        left.plot(range(len(rows)), accuracies, marker="o", linewidth=0.8, label=f"seed {seed}")
    left.set_xticks(range(len(rows)), [row["loader"] for row in rows])
    left.set(ylabel="accuracy on photographs kept back", title="at the end of training")
    left.legend(fontsize="small")
    width = 0.8 / (len(rows) + 1)
    for number, row in enumerate(rows):
        share = _shares(row["batches_by_slow_samples"])
        right.bar([at + number * width for at in range(len(share))], share, width, label=row["loader"])
    law = _shares(max((row["expected_by_slow_samples"] for row in rows), key=len))
    right.bar([at + len(rows) * width for at in range(len(law))], law, width, color="lightgrey", label="by chance")
    right.set(xlabel="slow samples in a batch", ylabel="share of batches", title="where slow samples go")
    right.legend(fontsize="small")
    figure.savefig(path, dpi=100)


def _shares(counts: Sequence[float]) -> list[float]:
    return [count / sum(counts) for count in counts]


def page(document: Mapping[str, Any], picture: str) -> str:
    """The page as Markdown; ``picture`` is the path of the picture from it."""
    settings = document["settings"]
    setting = "{photographs} photographs, {epochs} epochs, {seeds} seeds, batches of {batch_size}".format(**settings)
    titles = ["loader", "accuracy, median", "lowest", "highest", "mean difference to PyTorch (95 %)"]
    titles += ["slow in the first half", "in the second", "p-value of chance"]
    lines = [
        "# Does the order of delivery change what a model learns?",
        "",
        "Made by `python -m benchmarks.accuracy_page` from what `python -m benchmarks.accuracy` recorded; how it is",
        "measured is said in `benchmarks/accuracy.py`.",
        "",
        f"{described(document)}. {setting}.",
        "",
        f"![accuracy by loader and seed, slow samples by batch]({picture})",
        "",
    ]
    rows = []
    for row in document["rows"]:
        off = ""
        if "to_pytorch" in row:
            off = f"{row['to_pytorch']:+.4f} ({row['to_pytorch_low']:+.4f} to {row['to_pytorch_high']:+.4f})"
        cells = [f"{row[key]:.4f}" for key in ("accuracy", "accuracy_min", "accuracy_max")]
        shares = [f"{row[key]:.4f}" for key in ("slow_share_first_half", "slow_share_second_half")]
        chance = "" if row["p_value"] is None else f"{row['p_value']:.2f}"
        rows.append([row["loader"], *cells, off, *shares, chance])
    return "\n".join([*lines, report.markdown_table(titles, rows), ""])


@click.command(help=__doc__)
@click.argument("source", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("benchmarks/ACCURACY.md"))
def main(source: Path, out: Path) -> None:
    document = json.loads(source.read_text(encoding="utf-8"))
    picture = source.with_suffix(".png")
    draw(document["rows"], picture)
    out.write_text(page(document, os.path.relpath(picture, out.parent)), encoding="utf-8")
    click.echo(f"wrote {out} and {picture}")


if __name__ == "__main__":
    main()
