"""What the lanes' reports tell about costs, for the estimator."""

from __future__ import annotations

from typing import Any

from minato_gpu.batches.assembly import Assembly
from minato_gpu.estimates.estimator import Estimator, Observed
from minato_gpu.lanes.base import Failure, Features, Handed, Report
from minato_gpu.scheduling import messages as m


def observe(lane: str, chunk: m.Chunk, spans: tuple[m.Span, ...], report: Report, to: Estimator, of: Assembly) -> None:
    """Samples ``spans`` of the chunk were prepared on lanes of this kind."""
    count = report.done - report.first
    if chunk.kind != "run" or not count:
        return
    to.took(count, report.seconds)
    if chunk.stop >= 0:
        items = report.items or [None] * count
        if kept := sum(not isinstance(item, (Handed, Failure)) for item in items):
            to.cannot(chunk.stop, kept)
    if report.times is None:
        to.not_measured(spans)
        return
    serials = [serial for lo, hi in spans for serial in range(lo, hi)]
    keys = [of.window.key(serial) for serial in serials]
    handed = None
    if report.parts is not None:
        items = report.items or [None] * count
        handed = [item.nbytes if isinstance(item, Handed) else -1 for item in items]
    to.measured(lane, Observed(keys, serials, report.times, report.seconds, report.parts, handed))


def inspected(spans: tuple[m.Span, ...], items: list[Any], estimator: Estimator, assembly: Assembly) -> Any:
    """Host reads are done: their fields lie ready, and features give the costs (see ``Estimator.of_features``)."""
    features: list[tuple[float, ...] | None] = []
    serials = [serial for lo, hi in spans for serial in range(lo, hi)]
    keys = [assembly.window.key(serial) for serial in serials]
    for serial, item in zip(serials, items, strict=True):
        good = isinstance(item, Features)
        assembly.inspected(serial, item.fields if good else item)
        features.append(item.values if good else None)
    return estimator.of_features(serials, keys, features)
