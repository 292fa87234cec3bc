"""Loaders' figures as ``minato-gpu top`` shows them, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from minato_gpu.lab.console import Column, table
from minato_gpu.lab.top.client import JobState
from minato_gpu.lab.top.figures import LoaderFigures
from minato_gpu.samples import JSON

if TYPE_CHECKING:
    from rich.console import RenderableType

_BAR = 20


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
        yield Text(line[:width], style="bold" if line.startswith(found.of_all["loader"]) else "")
    yield table(lane_columns(found.lanes), width)


def lines(found: LoaderFigures) -> list[str]:
    """Returns the lines above the table of a loader's lanes."""
    from rich.filesize import decimal

    of = found.of_all
    in_flight, peak = decimal(of["in_flight_bytes"]), decimal(of["in_flight_peak_bytes"])
    waited = f"the training loop waited {of['wait_share']:.0%}{_causes(found.stall_shares)}"
    said = [
        f"{of['loader']}  epoch {of['epoch']}  {_progress(of['samples_delivered'], of['samples_expected'])}",
        f"{number(of['samples_per_s'])} samples/s; {waited}",
        f"{of['samples_failed']:,} samples failed; {in_flight} in flight, {peak} at most",
    ]
    if of["longest_wait"] is not None:
        said.append(longest_wait(of["longest_wait"]))
    storage = []
    if of["reads_per_s"] is not None:
        storage.append(f"{number(of['reads_per_s'])} reads/s, {decimal(round(of['read_bytes_per_s']))}/s")
    if known := [f"{tier} {'-' if share is None else f'{share:.0%}'}" for tier, share in found.hit_shares.items()]:
        storage.append(f"cache hits: {', '.join(known)}")
    if of["copied_share"] is not None:
        storage.append(f"{of['copied_share']:.0%} of the samples copied from other loaders")
    return [*said, "; ".join(storage)] if storage else said


def longest_wait(wait: Mapping[str, JSON]) -> str:
    """An entry of ``stats()["longest_waits"]`` in words."""
    causes = sorted(wait["causes"].items(), key=lambda item: -item[1])
    said = ", ".join(f"{cause} {number(seconds)} s" for cause, seconds in causes)
    last = "" if wait["lane"] is None else f"; last came {wait['key']!r} of lane {wait['lane']}"
    return f"longest wait {number(wait['seconds'])} s, for batch {wait['batch']}: {said}{last}"


def _progress(delivered: int, expected: int | None) -> str:
    if not expected:
        return f"{delivered:,} samples"
    share = min(1.0, delivered / expected)
    full = round(share * _BAR)
    return f"[{'#' * full}{'.' * (_BAR - full)}] {share:.0%}  {delivered:,} of {expected:,}"


def _causes(shares: Mapping[str, float]) -> str:
    causes = [f"{cause} {share:.0%}" for cause, share in shares.items() if share >= 0.005]
    return f": {', '.join(causes)}" if causes else ""


def lane_columns(lanes: Mapping[str, Mapping[str, JSON]]) -> list[Column]:
    """A row for each lane."""
    of = lanes.values()
    return [
        Column("lane", list(lanes)),
        Column("slots", [str(each["slots"]) for each in of], number=True),
        Column("busy", [f"{each['busy_share']:.0%}" for each in of], number=True),
        Column("samples/s", [number(each["samples_per_s"]) for each in of], number=True),
        Column("service p50 ms", [number(1e3 * each["service_p50_s"]) for each in of], number=True),
        Column("p99 ms", [number(1e3 * each["service_p99_s"]) for each in of], number=True),
    ]


def number(value: float) -> str:
    """With about three digits that tell something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
