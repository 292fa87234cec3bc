"""Shows what loaders have done between two answers of their process, for ``minato-gpu top``.

A wait, or a lease of a worker, is counted when it is over: shares are of what ended meanwhile, and never above 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from minato_gpu.lab.console import Column, table
from minato_gpu.lab.top.client import JobState, LoaderState
from minato_gpu.observe.counters import Counts, counters
from minato_gpu.samples import JSON

if TYPE_CHECKING:
    from rich.console import RenderableType

_BAR = 20


def job(before: JobState | None, now: JobState, width: int) -> list[RenderableType]:
    """Returns what to print of the process and each loader, ``width`` characters wide; rates as in ``rates_of``."""
    from rich.text import Text

    rank = "" if now.rank is None else f", rank {now.rank}"
    title = Text(f"process {now.pid}{rank}: {now.command}", style="italic", overflow="ellipsis", no_wrap=True)
    if not now.loaders:
        return [title, Text("no loader has begun an epoch")]
    earlier = {} if before is None else {each.name: each for each in before.loaders}
    return [title, *(part for each in now.loaders for part in _loader(earlier.get(each.name), each, width))]


def _loader(before: LoaderState | None, now: LoaderState, width: int) -> Iterable[RenderableType]:
    from rich.text import Text

    rates = rates_of(before, now)
    yield Text("")
    first, *rest = _lines(now, rates)
    yield Text(first[:width], style="bold")
    yield from (Text(line[:width]) for line in rest)
    lanes = now.stats["lanes"]
    yield table(
        [
            Column("lane", list(lanes)),
            Column("slots", [str(lane["slots"]) for lane in lanes.values()], number=True),
            Column("busy", [f"{_busy(name, lanes[name], rates):.0%}" for name in lanes], number=True),
            Column("samples/s", [_number(rates["lane_samples", name]) for name in lanes], number=True),
            *(
                Column(heading, [_number(1e3 * lane["service_s"][quantile]) for lane in lanes.values()], number=True)
                for heading, quantile in (("service p50 ms", "p50"), ("p99 ms", "p99"))
            ),
        ],
        width,
    )


def rates_of(before: LoaderState | None, now: LoaderState) -> Counts:
    """Returns the growth of counters a second since ``before``, or since the epoch began if that is None or of another
    epoch."""
    old: Counts = {}
    seconds = now.stats["elapsed_s"]
    if before is not None and before.epoch == now.epoch:
        old, seconds = counters(before.stats), now.at_s - before.at_s
    counts = counters(now.stats)
    return {key: max(0.0, count - old.get(key, 0.0)) / max(seconds, 1e-9) for key, count in counts.items()}


def _lines(now: LoaderState, rates: Counts) -> Iterator[str]:
    """Yields the lines above the table of a loader's lanes."""
    from rich.filesize import decimal

    stats = now.stats
    yield f"{now.name}  epoch {now.epoch}  {_progress(stats['samples_delivered'], stats['samples_expected'])}"
    waits = {cause: rate for (name, cause), rate in rates.items() if name == "wait_seconds"}
    causes = [
        f"{cause} {min(1.0, waits[cause]):.0%}"
        for cause in sorted(stats["stalls"], key=lambda each: -waits[each])
        if waits[cause] >= 0.005
    ]
    said = f"the training loop waited {min(1.0, sum(waits.values())):.0%}{': ' if causes else ''}{', '.join(causes)}"
    yield f"{_number(rates['samples', ''])} samples/s; {said}"
    failed = stats["samples_failed"] + stats["samples_skipped"]
    in_flight, peak = decimal(stats["bytes_in_flight"]), decimal(stats["bytes_in_flight_peak"])
    yield f"{failed:,} samples failed; {in_flight} in flight, {peak} at most"
    if longest := next(iter(stats.get("longest_waits", ())), None):
        yield _longest_wait(longest)
    storage = []
    if ("reads", "") in rates:
        nbytes = decimal(round(rates["read_bytes", ""]))
        storage.append(f"{_number(rates['reads', ''])} reads/s, {nbytes}/s")
    if hits := [f"{tier} {_hits(tier, rates, counters(stats))}" for tier in stats.get("cache", {})]:
        storage.append(f"cache hits: {', '.join(hits)}")
    shared = stats.get("share")
    if shared and (had := shared["granted"] + shared["copied"] + shared["again"]):
        storage.append(f"{shared['copied'] / had:.0%} of the samples copied from other loaders")
    if storage:
        yield "; ".join(storage)


def _busy(name: str, lane: Mapping[str, JSON], rates: Counts) -> float:
    share: float = rates["lane_busy_seconds", name] / max(lane["slots"], 1)
    return min(1.0, share)


def _hits(tier: str, *counted: Counts) -> str:
    """Returns the hit share of the first of these counts in which anything was asked for; "-" if in none."""
    for each in counted:
        hits = each.get(("cache_hits", tier), 0.0)
        if asked := hits + each.get(("cache_misses", tier), 0.0):
            return f"{hits / asked:.0%}"
    return "-"


def _longest_wait(wait: Mapping[str, JSON]) -> str:
    """An entry of ``stats()["longest_waits"]`` in words."""
    causes = sorted(wait["causes"].items(), key=lambda item: -item[1])
    said = ", ".join(f"{cause} {_number(seconds)} s" for cause, seconds in causes)
    last = "" if wait["lane"] is None else f"; last came {wait['key']!r} of lane {wait['lane']}"
    return f"longest wait {_number(wait['seconds'])} s, for batch {wait['batch']}: {said}{last}"


def _progress(delivered: int, expected: int | None) -> str:
    if not expected:
        return f"{delivered:,} samples"
    share = min(1.0, delivered / expected)
    full = round(share * _BAR)
    return f"[{'#' * full}{'.' * (_BAR - full)}] {share:.0%}  {delivered:,} of {expected:,}"


def _number(value: float) -> str:
    """Returns the number in text, with about three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
