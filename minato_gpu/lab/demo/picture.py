"""Draws what a loader did over time: every slot busy or idle, slow samples, every batch's hand-over.

The input is what ``DataLoader.timeline()`` returns, one for each epoch drawn. Nothing is computed here that is
not in the timeline, so the picture can be made from a recorded one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from minato_gpu.samples import JSON

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Lanes keep their colours.
_BUSY = {"cpu": "#4c78a8", "device": "#59a14f"}
_WAIT, _STEP, _IDLE, _INK = "#c8374a", "#d9d9d9", "#f4f4f4", "#333333"
_SLOW = "v"  # a mark above the strip
_ROW_HEIGHT = 0.72


class Span(NamedTuple):
    """A stretch of work of one slot, as ``DataLoader.timeline()`` gives it; times in seconds from ``iter()``."""

    start: float
    end: float
    lane: str
    slot: int
    epoch: int
    first_position: int
    samples: int
    slow: bool


class DeliveredBatch(NamedTuple):
    """A batch given to the consumer at ``at`` seconds, after the consumer had waited for ``wait`` seconds."""

    at: float
    epoch: int
    number: int
    size: int
    wait: float


def draw(timelines: Sequence[Mapping[str, JSON]], path: str | os.PathLike[str], title: str) -> None:
    """Saves a PNG with one panel for each timeline (for example one for each epoch) at ``path``."""
    figure(timelines, title).savefig(path, facecolor="white")


def figure(timelines: Sequence[Mapping[str, JSON]], title: str) -> Figure:
    """The picture as a matplotlib figure, one axes for each timeline. Touches no window system."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [
        ([Span(*span) for span in timeline["spans"]], [DeliveredBatch(*batch) for batch in timeline["batches"]])
        for timeline in timelines
    ]
    # Inches: a strip for each slot and for the consumer, and room for the axis and the panel's title.
    heights = [0.42 * (len(_slots(spans)) + 1) + 0.85 for spans, _ in panels]
    made = Figure(figsize=(13.0, sum(heights) + 1.25), layout="constrained", dpi=130)
    FigureCanvasAgg(made)
    made.suptitle(title, x=0.012, ha="left", fontsize=15, fontweight="bold", color=_INK)
    axes = made.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for number, (axis, (spans, batches)) in enumerate(zip(axes, panels, strict=True), start=1):
        _panel(axis, spans, batches, f"epoch {number} of {len(panels)}")
    axes[-1].set_xlabel("seconds from the start of the epoch", color=_INK)
    _legend(made, sorted({span.lane for spans, _ in panels for span in spans}))
    return made


def _slots(spans: Sequence[Span]) -> list[tuple[str, int]]:
    """The slots that worked, CPU lane first."""
    return sorted({(span.lane, span.slot) for span in spans})


def _panel(axis: Axes, spans: Sequence[Span], batches: Sequence[DeliveredBatch], name: str) -> None:
    slots = _slots(spans)
    end = max([span.end for span in spans] + [batch.at for batch in batches], default=1.0)
    begin = min([0.0] + [span.start for span in spans])
    for row, (lane, slot) in enumerate(slots):
        mine = [span for span in spans if (span.lane, span.slot) == (lane, slot)]
        _strip(axis, row, [(begin, end - begin)], _IDLE)
        _strip(axis, row, [(span.start, span.end - span.start) for span in mine], _BUSY[lane])
        slow = [(span.start + span.end) / 2 for span in mine if span.slow]
        axis.plot(slow, [row - _ROW_HEIGHT / 2] * len(slow), linestyle="", marker=_SLOW, markersize=4, color=_INK)
        _said(axis, row, f"{_covered(mine) / (end - begin):4.0%} busy")
    row = len(slots)
    _strip(axis, row, [(begin, end - begin)], _STEP)
    _strip(axis, row, [(batch.at - batch.wait, batch.wait) for batch in batches], _WAIT)
    axis.vlines([batch.at for batch in batches], -0.5, row + _ROW_HEIGHT / 2, color=_INK, linewidth=0.4, alpha=0.3)
    _said(axis, row, f"{sum(batch.wait for batch in batches) / end:4.0%} waiting")
    axis.set_ylim(row + 0.62, -0.62)
    axis.set_yticks(range(row + 1), [f"{lane} slot {slot}" for lane, slot in slots] + ["consumer"])
    axis.set_xlim(begin, end * 1.002)
    samples = sum(batch.size for batch in batches)
    axis.set_title(f"{name}: {samples:,} samples in {end:.1f} s", loc="left", fontsize=11, color=_INK)
    axis.tick_params(length=0, colors=_INK)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _strip(axis: Axes, row: int, bars: Sequence[tuple[float, float]], colour: str) -> None:
    """Draws bars, (start, length) each, in a row; later ones above earlier ones."""
    axis.broken_barh(bars, (row - _ROW_HEIGHT / 2, _ROW_HEIGHT), facecolors=colour, linewidth=0)


def _said(axis: Axes, row: int, text: str) -> None:
    axis.text(1.005, row, text, transform=axis.get_yaxis_transform(), va="center", color=_INK)


def _covered(spans: Sequence[Span]) -> float:
    """Seconds in which at least one of the spans was open."""
    covered, reached = 0.0, float("-inf")
    for span in sorted(spans):
        covered += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return covered


def _legend(figure: Figure, lanes: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colours = {f"{lane} lane": _BUSY[lane] for lane in lanes}
    colours |= {"idle": _IDLE, "consumer at work": _STEP, "consumer waits": _WAIT}
    entries: list[Patch | Line2D] = [Patch(color=colour, label=label) for label, colour in colours.items()]
    entries.append(Line2D([], [], color=_INK, linestyle="", marker=_SLOW, label="slow sample"))
    entries.append(Line2D([], [], color=_INK, linewidth=0.9, label="batch handed over"))
    figure.legend(handles=entries, loc="outside lower left", ncols=len(entries), frameon=False, fontsize=9)
