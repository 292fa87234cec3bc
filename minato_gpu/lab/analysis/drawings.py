"""The report's pictures: drawings in SVG, by Matplotlib, small enough to be read on a phone.

Text is drawn as outlines, so that a picture looks the same in every browser; what it shows is said beside it in words
and in a table. Any two colours of a picture stay apart for colour-blind readers (a test simulates what they see).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import numpy as np

from minato_gpu.lab.analysis.breakdown import TITLES
from minato_gpu.lab.analysis.profile import Phase
from minato_gpu.lab.numbers import number
from minato_gpu.samples import JSON

COLOURS = {
    "compute": "#117733",
    "transfer": "#7B3294",
    "loader": "#333333",
    "ranks": "#999999",
    "preparation": "#E69F00",
    "fetch": "#56B4E9",
}
PHASES = {
    "sight": COLOURS["ranks"],
    "compute": COLOURS["compute"],
    "warm": COLOURS["preparation"],
    "cold": COLOURS["fetch"],
    "prepare": COLOURS["transfer"],
}
_INK, _LINE, _MEASURED = "#222222", "#0072B2", "#D55E00"
_WIDTH, _HEIGHT = 4.4, 2.7  # inches: two columns on a desk, one on a phone
_MOST_POINTS = 600
_STYLE: Any = {
    "axes.edgecolor": _INK,
    "axes.grid": True,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": "#DDDDDD",
    "legend.fontsize": 8,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "minato_gpu",
}
P = ParamSpec("P")


def _drawn(draw: Callable[Concatenate[Any, P], None]) -> Callable[P, str]:
    """A function that draws on Matplotlib's axes, as one that returns the picture."""

    @wraps(draw)
    def picture(*args: P.args, **kwargs: P.kwargs) -> str:
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        with rc_context(_STYLE):
            figure = Figure((_WIDTH, _HEIGHT), layout="constrained")
            axes = figure.subplots()
            axes.set_axisbelow(True)
            draw(axes, *args, **kwargs)
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None})
        text = out.getvalue()
        return text[text.index("<svg") :]

    return picture


@_drawn
def breakdown(axes: Any, ranks: Sequence[tuple[int, Mapping[str, float]]]) -> None:
    """One bar for each rank: the share of each part of its epoch, by the part's name."""
    axes.figure.set_figheight(1.6 + 0.35 * len(ranks))
    for row, (_, shares) in enumerate(ranks):
        left = 0.0
        for name, share in shares.items():
            bar = axes.barh(row, share, left=left, color=COLOURS[name], edgecolor="white", height=0.7)
            if share > 0.08:
                axes.bar_label(bar, [f"{share:.0%}"], label_type="center", color=_ink_on(COLOURS[name]), fontsize=8)
            left += share
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank, _ in ranks])
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.invert_yaxis()
    axes.grid(visible=False)
    names = [name for name in COLOURS if any(shares.get(name, 0) > 0 for _, shares in ranks)]
    handles = [axes.barh(0, 0, color=COLOURS[name]) for name in names]
    axes.legend(handles, [TITLES[name] for name in names], loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=2)


@_drawn
def curve(axes: Any, points: Mapping[float, Mapping[str, JSON]], unit: str, measured: Mapping[float, float]) -> None:
    """An epoch's seconds over a setting, with the interval, from rows of ``questions.answer``; ``measured``: where it
    was measured, and what."""
    at = list(points)
    low, epoch, high = ([row[name] for row in points.values()] for name in ("low_s", "epoch_s", "high_s"))
    axes.fill_between(at, low, high, color=_LINE, alpha=0.2, lw=0)
    axes.plot(at, epoch, color=_LINE, marker="o", ms=3, label="predicted")
    if measured:
        axes.plot(*zip(*measured.items(), strict=True), color=_MEASURED, marker="D", ls="", ms=6, label="measured")
    if min(at) > 0 and max(at) > 20 * min(at):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_written)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(unit)
    axes.set_ylabel("epoch, s")
    axes.legend(loc="best")


@_drawn
def costs(axes: Any, seconds: Sequence[float]) -> None:
    """How many samples take how long."""
    milliseconds = 1e3 * np.maximum(np.array(seconds), 1e-6)
    low, high = float(milliseconds.min()), float(milliseconds.max())
    if high > 10 * low:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_written)
        edges = np.geomspace(low, high * 1.001, 31)
    else:
        edges = np.linspace(low, high * 1.001 + 1e-9, 31)
    axes.hist(milliseconds, edges, color=_LINE)
    axes.axvline(float(np.median(milliseconds)), color=_MEASURED, ls="--", label="median")
    axes.set_xlabel("ms of one worker")
    axes.set_ylabel("samples")
    axes.legend()


@_drawn
def stages(axes: Any, seconds: Mapping[str, float]) -> None:
    """Bars of each stage's time for a sample, the costliest first."""
    axes.figure.set_figheight(1.1 + 0.3 * len(seconds))
    found = sorted(seconds.items(), key=lambda each: each[1])
    axes.barh([name for name, _ in found], [1e3 * value for _, value in found], color=_LINE)
    axes.set_xlabel("ms of a sample")
    axes.grid(visible=False, axis="y")


@_drawn
def workers(axes: Any, points: Sequence[tuple[int, float]], fitted: Callable[[float], float] | None) -> None:
    """Samples a second by number of workers, as measured, and the law that was fitted."""
    most = max(count for count, _ in points)
    if fitted is not None:
        counts = np.linspace(1, 2 * most, 40)
        axes.plot(counts, [fitted(float(count)) for count in counts], color=_LINE, label="fitted")
    axes.plot(*zip(*points, strict=True), color=_MEASURED, marker="D", ls="", ms=6, label="measured")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("workers")
    axes.set_ylabel("samples/s, everything cached")
    axes.legend()


@_drawn
def batches(axes: Any, phases: Mapping[str, Phase]) -> None:
    """Each batch's time since the one before, phase by phase."""
    begin, seen = 0.0, [1e3 * each for phase in phases.values() for each in phase.batch_s if each > 0]
    least, most = np.quantile(seen, [0.01, 0.99]) if seen else (1.0, 1.0)
    for name, phase in phases.items():
        times = np.array(phase.batch_s)
        at = begin + np.cumsum(times)
        every = -(-len(times) // _MOST_POINTS)
        axes.plot(at[::every], 1e3 * times[::every], color=PHASES[name], lw=0.8, marker=".", ms=2, label=name)
        begin = float(at[-1]) if len(at) else begin
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_written)
    axes.yaxis.set_minor_formatter(_written if most < 5 * least else "")
    axes.set_xlabel("s of the analysis")
    axes.set_ylabel("ms from batch to batch")
    axes.legend(ncols=2)


def _written(value: float, _: int) -> str:
    """The label of an axis at this value."""
    return number(value)


def _ink_on(colour: str) -> str:
    """Black or white, whichever stands out more (WCAG's relative luminance)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return "white" if np.dot(linear, (0.2126, 0.7152, 0.0722)) < 0.18 else "black"
