"""The page of recorded runs: ``python -m benchmarks.scaling.page FOLDER --out benchmarks/SCALING.md``.

``FOLDER`` holds what ``python -m benchmarks.scaling`` left with ``--json``: scaling_named.json, scaling_close.json,
scaling_kinds.json and scaling.json (the matrix), or some of them. A picture of the matrix is written beside it.
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
from benchmarks.scaling.summary import COLUMNS, summary

Row = Mapping[str, Any]

_TITLES = {
    "scaling_named.json": "The named cells",
    "scaling_close.json": "The five closest of them, five times",
    "scaling_kinds.json": "Other kinds of data",
    "scaling.json": "The matrix",
}
_LINES = {
    "pytorch in order": ("tab:blue", "-"),
    "pytorch out of order": ("tab:blue", ":"),
    "spdl": ("tab:green", "--"),
    "torchdata": ("tab:purple", "--"),
    "minato_gpu in order": ("tab:orange", "-"),
    "minato_gpu bounded": ("tab:orange", ":"),
}
"""Of a family of peers, the best at each point."""
_BARE = "no loader"


def draw(rows: Sequence[Row], path: Path) -> None:
    """The share of the bound over the number of workers: a panel for each cost and spread, consumers without steps."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    shown = [row for row in rows if not row["load"] and row["kind"] == "arrays" and "of_bound" in row]
    costs = sorted({row["cost_ms"] for row in shown})
    spreads = list(dict.fromkeys(row["spread"] for row in shown))
    figure = Figure(figsize=(2 + 3.2 * len(costs), 1 + 2.6 * len(spreads)), layout="constrained")
    panels = figure.subplots(len(spreads), len(costs), sharex=True, sharey=True, squeeze=False)
    for line, spread in zip(panels, spreads, strict=True):
        for axes, cost in zip(line, costs, strict=True):
            cell = [row for row in shown if row["spread"] == spread and row["cost_ms"] == cost]
            for name, points in _curves(cell).items():
                colour, style = _LINES.get(name, ("lightgrey", "-"))
                axes.plot(*zip(*points, strict=True), style, color=colour, marker=".", linewidth=1, label=name)
            axes.set(title=f"{cost:g} ms, {spread}", xscale="log", ylim=(0, 1.05))
            axes.set_xticks(sorted({row["workers"] for row in shown}))
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.xaxis.set_minor_formatter(NullFormatter())
    for axes in panels[-1]:
        axes.set_xlabel("workers")
    for axes in panels[:, 0]:
        axes.set_ylabel("share of the bound")
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(7, 2 * len(costs)),
        fontsize="small",
    )
    figure.savefig(path, dpi=80)


def _curves(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """Points by curve: workers, and the share of the bound."""
    best: dict[str, dict[int, float]] = {}
    for row in rows:
        best.setdefault(_BARE, {})[row["workers"]] = row["bare_of_bound"]
        names = [name for name in _LINES if row["loader"].startswith(name)]
        for name in names:
            points = best.setdefault(name, {})
            points[row["workers"]] = max(points.get(row["workers"], 0.0), row["of_bound"])
    return {name: sorted(points.items()) for name, points in best.items()}


def section(title: str, document: Mapping[str, Any]) -> str:
    """The Markdown of one document."""
    settings = document["settings"]
    cells = [
        ["" if row.get(key) is None else form.format(row[key]) for key, _, form in COLUMNS]
        for row in summary(document["rows"])
    ]
    table = report.markdown_table([title for _, title, _ in COLUMNS], cells)
    times = f"{settings['repetitions']} repetition(s), medians"
    return f"## {title}\n\n{described(document)}; {times}. Samples {settings['samples']}.\n\n{table}\n"


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("benchmarks/SCALING.md"))
def main(folder: Path, out: Path) -> None:
    found = {name: folder / name for name in _TITLES if (folder / name).exists()}
    if not found:
        raise click.UsageError(f"{folder} holds none of {', '.join(_TITLES)}: python -m benchmarks.scaling --json ...")
    documents = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in found.items()}
    text = [_HEAD]
    if "scaling.json" in found:
        picture = found["scaling.json"].with_suffix(".png")
        draw(documents["scaling.json"]["rows"], picture)
        text.append(f"![share of the bound over workers]({os.path.relpath(picture, out.parent)})\n")
        click.echo(f"wrote {picture}")
    text += [section(_TITLES[name], document) for name, document in documents.items()]
    out.write_text("\n".join(text), encoding="utf-8")
    click.echo(f"wrote {out}")


_HEAD = """# How far workers scale

Made by `python -m benchmarks.scaling.page FOLDER` from what `python -m benchmarks.scaling` recorded; what the figures
mean is said in `benchmarks/scaling/__main__.py`. Shares of the bound, in the second epoch. Cores are emulated: samples
sleep, so only what the loaders themselves spend is real. "No loader" is what bare processes reach: what is missing
there the machine takes off any loader.
"""


if __name__ == "__main__":
    main()
