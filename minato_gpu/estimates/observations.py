"""Turns lanes' reports into observations of costs for the estimator."""

from __future__ import annotations

from collections.abc import Set

from minato_gpu.estimates.estimator import Estimator, Observed, Predicted
from minato_gpu.lanes.base import Failure, Features, Handed, HostRead, Item, Report
from minato_gpu.lanes.contract import Lane
from minato_gpu.samples import TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.spans import TicketSpan, singles, tickets
from minato_gpu.window.assembly import Assembly


def observe(
    lane: Lane,
    chunk: m.Chunk,
    spans: tuple[TicketSpan, ...],
    report: Report,
    to: Estimator,
    of: Assembly,
    copies: Set[TicketId],
) -> None:
    """Gives ``to`` the costs of a chunk's newly reported samples ``spans``, if the chunk was to prepare them ("run").

    Times that another machine has measured are ignored, and those of ``copies``, samples that another loader has
    prepared. ``of`` knows the samples' keys.
    """
    count = report.done - report.first
    if chunk.kind != "run" or not count:
        return
    if not lane.on_host:
        to.not_measured(spans)
        return
    to.took(count, report.seconds if report.own_s is None else report.own_s)
    if lane.kind == m.CPU and report.parts is None and chunk.stop < 0:
        _observe_whole(spans, report, to, of, copies)
    else:
        _observe_parts(lane, chunk, spans, report, to, of)


def _observe_whole(
    spans: tuple[TicketSpan, ...], report: Report, to: Estimator, of: Assembly, copies: Set[TicketId]
) -> None:
    """Learns from samples that a CPU worker has prepared from beginning to end."""
    if report.times is None:
        to.not_measured(spans)
        return
    serials = [*tickets(spans)] if to.by_serial or copies else []
    seen = Observed(of.window.keys(spans), serials, report.times, report.seconds)
    seen = seen.without(copies) if copies else seen
    if seen.keys:
        to.measured(m.CPU, seen)


def _observe_parts(
    lane: Lane, chunk: m.Chunk, spans: tuple[TicketSpan, ...], report: Report, to: Estimator, of: Assembly
) -> None:
    """Learns from samples of a device, and from those that the CPU has prepared in parts or was to hand over."""
    count = report.done - report.first
    items = report.items or [None] * count
    serials = [*tickets(spans)]
    if chunk.stop >= 0 and (kept := sum(not isinstance(item, (Handed, Failure)) for item in items)):
        to.could_not_send(chunk.stop, kept)
    # a device was never given what could not be read: that cost it nothing
    ran = [at for at, item in enumerate(items) if lane.kind == m.CPU or not isinstance(item, Failure)]
    times, parts = report.times, report.parts
    if times is None or not ran:
        to.not_measured(spans)
        return
    to.not_measured(singles(serials[at] for at in set(range(count)).difference(ran)))
    seen = Observed(
        keys=[of.window.key(serials[at]) for at in ran],
        serials=[serials[at] for at in ran],
        seconds=[times[at] for at in ran],
        took=report.seconds,
        parts=None if parts is None else [parts[at] for at in ran],
        handed=[item.nbytes if isinstance(item, Handed) else -1 for item in (items[at] for at in ran)],
    )
    to.measured(lane.kind, seen)


def inspected(
    spans: tuple[TicketSpan, ...], items: list[Item], estimator: Estimator | None, assembly: Assembly
) -> Predicted:
    """Stores the fields of finished host reads, and returns the costs that their features predict (nan without
    ``estimator``)."""
    sources: list[HostRead] = []
    features: list[tuple[float, ...] | None] = []
    for item in items:
        if isinstance(item, Features):
            sources.append(item.fields)
            features.append(item.values)
        else:
            assert isinstance(item, Failure)
            sources.append(item)
            features.append(None)
    assembly.samples.inspected(spans, sources)
    if estimator is None:
        unknown = [float("nan")] * len(items)
        return unknown, unknown, None
    return estimator.of_features([*tickets(spans)], assembly.window.keys(spans), features)
