"""Draws what a loader did over time: every slot busy or idle, slow samples, every batch's hand-over.

The input is what ``DataLoader.timeline()`` returns, one for each epoch drawn. Nothing is computed here that is
not in the timeline, so the picture can be made from a recorded one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from minato_gpu.samples import JSON

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Lanes keep their colours; slow samples are hatched.
_BUSY = {"cpu": "#4c78a8", "device": "#59a14f"}
_SLOW_HATCH = "////"
_WAIT = "#c8374a"
_STEP = "#d9d9d9"
_IDLE = "#f4f4f4"
_INK = "#333333"
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

    panels = [_parsed(timeline) for timeline in timelines]
    rows = [_slots(spans) for spans, _ in panels]
    # Inches: a strip for each slot and for the consumer, and room for the axis and the panel's title.
    heights = [0.42 * (len(slots) + 1) + 0.85 for slots in rows]
    made = Figure(figsize=(13.0, sum(heights) + 1.25), layout="constrained", dpi=130)
    FigureCanvasAgg(made)
    made.suptitle(title, x=0.012, ha="left", fontsize=15, fontweight="bold", color=_INK)
    axes = made.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for number, (axis, slots, (spans, batches)) in enumerate(zip(axes, rows, panels, strict=True), start=1):
        _panel(axis, slots, spans, batches, f"epoch {number} of {len(panels)}")
    axes[-1].set_xlabel("seconds from the start of the epoch", color=_INK)
    _legend(made, {span.lane for spans, _ in panels for span in spans})
    return made


def _parsed(timeline: Mapping[str, JSON]) -> tuple[list[Span], list[DeliveredBatch]]:
    return [Span(*span) for span in timeline["spans"]], [DeliveredBatch(*batch) for batch in timeline["batches"]]


def _slots(spans: Sequence[Span]) -> list[tuple[str, int]]:
    """The slots that worked, CPU lane first."""
    return sorted({(span.lane, span.slot) for span in spans})


def _panel(
    axis: Axes, slots: Sequence[tuple[str, int]], spans: Sequence[Span], batches: Sequence[DeliveredBatch], name: str
) -> None:
    end = max([span.end for span in spans] + [batch.at for batch in batches], default=1.0)
    begin = min([0.0] + [span.start for span in spans])
    for row, (lane, slot) in enumerate(slots):
        mine = [span for span in spans if (span.lane, span.slot) == (lane, slot)]
        axis.broken_barh([(begin, end - begin)], (row - _ROW_HEIGHT / 2, _ROW_HEIGHT), facecolors=_IDLE, zorder=1)
        _strip(axis, row, lane, mine)
        share = _covered(mine) / (end - begin)
        axis.text(1.005, row, f"{share:4.0%} busy", transform=axis.get_yaxis_transform(), va="center", color=_INK)
    _consumer(axis, len(slots), batches, end)
    axis.set_ylim(len(slots) + 0.62, -0.62)
    axis.set_yticks(range(len(slots) + 1), [f"{lane} slot {slot}" for lane, slot in slots] + ["consumer"])
    axis.set_xlim(begin, end * 1.002)
    samples = sum(batch.size for batch in batches)
    axis.set_title(f"{name}: {samples:,} samples in {end:.1f} s", loc="left", fontsize=11, color=_INK)
    axis.tick_params(length=0, colors=_INK)
    axis.grid(axis="x", color="#eeeeee", zorder=0)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color("#bbbbbb")


def _strip(axis: Axes, row: int, lane: str, spans: Sequence[Span]) -> None:
    """One slot's work, in the lane's colour. Slow work is hatched, and marked above the strip, so that all is seen."""
    low = row - _ROW_HEIGHT / 2
    colour = _BUSY.get(lane, "#888888")
    for slow in (False, True):
        bars = [(span.start, span.end - span.start) for span in spans if span.slow == slow]
        look: dict[str, Any] = {"hatch": _SLOW_HATCH, "edgecolors": _INK} if slow else {"edgecolors": "none"}
        axis.broken_barh(bars, (low, _ROW_HEIGHT), facecolors=colour, linewidth=0.4, zorder=2 + slow, **look)
    middles = [(span.start + span.end) / 2 for span in spans if span.slow]
    axis.plot(middles, [low - 0.02] * len(middles), linestyle="", marker=7, markersize=4, color=_INK, zorder=4)


def _consumer(axis: Axes, row: int, batches: Sequence[DeliveredBatch], end: float) -> None:
    """The consumer's strip: at work, or waiting for a batch; each hand-over is a tick up to the slots."""
    low = row - _ROW_HEIGHT / 2
    axis.broken_barh(_steps(batches, end), (low, _ROW_HEIGHT), facecolors=_STEP, zorder=2)
    waits = [(batch.at - batch.wait, batch.wait) for batch in batches]
    axis.broken_barh(waits, (low, _ROW_HEIGHT), facecolors=_WAIT, zorder=3)
    axis.vlines([batch.at for batch in batches], low, row + _ROW_HEIGHT / 2, color=_INK, linewidth=0.7, zorder=4)
    axis.vlines([batch.at for batch in batches], -0.5, low, color=_INK, linewidth=0.4, alpha=0.22, zorder=3)
    waited = sum(batch.wait for batch in batches) / end
    axis.text(1.005, row, f"{waited:4.0%} waiting", transform=axis.get_yaxis_transform(), va="center", color=_INK)


def _steps(batches: Sequence[DeliveredBatch], end: float) -> list[tuple[float, float]]:
    """(start, length) of the stretches in which the consumer had a batch and worked on it."""
    ends = [*(following.at - following.wait for following in batches[1:]), end]
    return [(batch.at, max(0.0, until - batch.at)) for batch, until in zip(batches, ends, strict=False)]


def _covered(spans: Sequence[Span]) -> float:
    """Seconds in which at least one of the spans was open."""
    covered, reached = 0.0, float("-inf")
    for span in sorted(spans):
        covered += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return covered


def _legend(figure: Figure, lanes: set[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Patch | Line2D] = [
        Patch(color=_BUSY.get(lane, "#888888"), label=f"{lane} lane") for lane in sorted(lanes)
    ]
    entries += [
        Patch(
            facecolor="white", edgecolor=_INK, hatch=_SLOW_HATCH, label="slow sample (\N{BLACK DOWN-POINTING TRIANGLE})"
        ),
        Patch(color=_IDLE, label="idle"),
        Patch(color=_STEP, label="consumer at work"),
        Patch(color=_WAIT, label="consumer waits"),
        Line2D([], [], color=_INK, linewidth=0.9, label="batch handed over"),
    ]
    figure.legend(
        handles=entries,
        loc="outside lower left",
        ncols=len(entries),
        frameon=False,
        labelcolor=_INK,
        fontsize=9,
        columnspacing=1.4,
    )
