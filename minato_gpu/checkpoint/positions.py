"""Which positions of an epoch were delivered, as plain data, and back."""

from __future__ import annotations

from collections.abc import Mapping

from minato_gpu.checkpoint import state as s
from minato_gpu.packing import packed
from minato_gpu.samples import JSON
from minato_gpu.sampling.delivered import DeliveredPositions

_MOST_BYTES = 1 << 20  # of bits above the line: eight million samples, more than any window holds


def plain_positions(delivered: DeliveredPositions) -> s.State:
    """A record as plain data."""
    out: s.State = {"batches": delivered.batches, "below": delivered.low, "above": packed(delivered.bits())}
    return {**out, "failed": delivered.failed} if delivered.failed else out


def positions_of(progress: Mapping[str, JSON]) -> DeliveredPositions:
    """The record that ``plain_positions`` made plain. Raises ValueError for anything else."""
    if len(above := s.unpacked(progress, "above")) > _MOST_BYTES:
        raise ValueError("state: 'above' is longer than any window")
    delivered = DeliveredPositions.of_bits(s.number(progress, "batches"), s.number(progress, "below"), above)
    if progress.get("failed") is not None:
        delivered.failed = s.number(progress, "failed")
    return delivered
