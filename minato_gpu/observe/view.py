"""Loaders' figures as ``minato-gpu top`` shows them, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from minato_gpu.console import Column, table
from minato_gpu.observe.asking import JobState
from minato_gpu.observe.figures import LaneFigures, LoaderFigures
from minato_gpu.samples import JSON

if TYPE_CHECKING:
    from rich.console import RenderableType

_BAR = 20
_UNITS = ("B", "kB", "MB", "GB", "TB")


def job(state: JobState, found: Sequence[LoaderFigures], width: int) -> list[RenderableType]:
    """The process, and each of its loaders."""
    from rich.text import Text

    rank = "" if state.rank is None else f", rank {state.rank}"
    title = Text(f"process {state.pid}{rank}: {state.command}", style="italic", overflow="ellipsis", no_wrap=True)
    if not found:
        return [title, Text("no loader has begun an epoch")]
    return [title, *(part for each in found for part in _loader(each, width))]


def _loader(found: LoaderFigures, width: int) -> Iterable[RenderableType]:
    from rich.text import Text

    yield Text("")
    for line in lines(found):
        yield Text(line[:width], style="bold" if line.startswith(found.name) else "")
    yield table(lane_columns(found.lanes), width)


def lines(found: LoaderFigures) -> list[str]:
    """What is said of a loader above the table of its lanes."""
    in_flight, peak = size(found.in_flight_bytes), size(found.in_flight_peak_bytes)
    said = [
        f"{found.name}  epoch {found.epoch}  {_progress(found)}",
        f"{number(found.samples_per_s)} samples/s; the training loop waited {found.wait_share:.0%}{_causes(found)}",
        f"{found.failed:,} samples failed; {in_flight} in flight, {peak} at most",
    ]
    if found.reads_per_s is not None and found.read_bytes_per_s is not None:
        said.append(f"{number(found.reads_per_s)} reads/s, {size(found.read_bytes_per_s)}/s{_hits(found)}")
    elif found.hit_shares:
        said.append(_hits(found).lstrip("; "))
    return said


def _progress(found: LoaderFigures) -> str:
    if not found.expected:
        return f"{found.delivered:,} samples"
    share = min(1.0, found.delivered / found.expected)
    full = round(share * _BAR)
    return f"[{'#' * full}{'.' * (_BAR - full)}] {share:.0%}  {found.delivered:,} of {found.expected:,}"


def _causes(found: LoaderFigures) -> str:
    causes = [f"{cause} {share:.0%}" for cause, share in found.stall_shares.items() if share >= 0.005]
    return f": {', '.join(causes)}" if causes else ""


def _hits(found: LoaderFigures) -> str:
    known = [f"{tier} {'-' if share is None else f'{share:.0%}'}" for tier, share in found.hit_shares.items()]
    return f"; cache hits: {', '.join(known)}" if known else ""


def lane_columns(lanes: Sequence[LaneFigures]) -> list[Column]:
    """A row for each lane."""
    return [
        Column("lane", [each.lane for each in lanes]),
        Column("slots", [str(each.slots) for each in lanes], number=True),
        Column("busy", [f"{each.busy_share:.0%}" for each in lanes], number=True),
        Column("samples/s", [number(each.samples_per_s) for each in lanes], number=True),
        Column("service p50 ms", [number(1e3 * each.service_p50_s) for each in lanes], number=True),
        Column("p99 ms", [number(1e3 * each.service_p99_s) for each in lanes], number=True),
    ]


def number(value: float) -> str:
    """With about three digits that tell something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def size(nbytes: float) -> str:
    """Bytes in the largest unit of which there is at least one."""
    power = 0
    while nbytes >= 1000 and power < len(_UNITS) - 1:
        nbytes, power = nbytes / 1000, power + 1
    return f"{nbytes:.0f} B" if power == 0 else f"{nbytes:.1f} {_UNITS[power]}"


def row(state: JobState, found: LoaderFigures) -> dict[str, JSON]:
    """The same as a flat row, for ``--json``."""
    return {
        "pid": state.pid,
        "rank": state.rank,
        "loader": found.name,
        "epoch": found.epoch,
        "samples_delivered": found.delivered,
        "samples_expected": found.expected,
        "samples_per_s": found.samples_per_s,
        "wait_share": found.wait_share,
        **{f"stall_{cause}_share": share for cause, share in found.stall_shares.items()},
        "samples_failed": found.failed,
        "in_flight_bytes": found.in_flight_bytes,
        "in_flight_peak_bytes": found.in_flight_peak_bytes,
        "reads_per_s": found.reads_per_s,
        "read_bytes_per_s": found.read_bytes_per_s,
        **{f"cache_{tier}_hit_share": share for tier, share in found.hit_shares.items()},
        **{f"lane_{each.lane}_{name}": value for each in found.lanes for name, value in _lane_row(each).items()},
    }


def _lane_row(lane: LaneFigures) -> dict[str, JSON]:
    return {
        "slots": lane.slots,
        "busy_share": lane.busy_share,
        "samples_per_s": lane.samples_per_s,
        "service_p50_s": lane.service_p50_s,
        "service_p99_s": lane.service_p99_s,
    }
