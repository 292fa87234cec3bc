"""A trace of every sample's way, for Perfetto's viewer (ui.perfetto.dev).

Tracks: the epochs; the training loop with its waits by cause, and its step with each batch; every slot of every lane
with the samples that it worked on, costly ones each by itself and cheap ones by the chunk; how many samples are ready
beyond each batch. An arrow leads from the work to the step with the batch that its samples came in.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from minato_gpu.observe import facts as f
from minato_gpu.observe.trace_file import TraceFile
from minato_gpu.scheduling.spans import Span
from minato_gpu.util.messages import LOGGER

_BEGIN, _END, _INSTANT = 1, 2, 3  # TrackEvent.Type
LIMIT = 256 << 20  # bytes: two million samples that are recorded one by one
_OVERLAP_S = 50e-6  # two clocks' difference: work of one slot that overlaps more goes to another track

PROCESS, EPOCHS, LOOP, READY = 1, 2, 3, 4  # tracks; those of slots follow

_Arrow = tuple[int, int, int]  # first position, position after the last, number


def write_trace(facts: f.Facts, path: Path, owner: object, limit: int = LIMIT) -> None:
    """Writes facts to ``path``, at most ``limit`` bytes, until ``owner`` is gone or Python ends.

    Raises OSError if the file cannot be written.
    """
    file = TraceFile(path, limit)
    weakref.finalize(owner, file.close)

    def full() -> None:
        facts.unsubscribe(trace)
        LOGGER.warning("%s holds its %d bytes: what happens from now on is not in it", file.path, limit)

    rank = os.environ.get("RANK")
    trace = Trace(file, "minato_gpu" if rank is None else f"minato_gpu, rank {rank}", os.getpid(), full)
    facts.subscribe(trace)


class Trace:
    """Subscribes to a loader's facts and writes them to ``file``.

    ``name`` is the process's; ``on_full`` is called when there is no room left.
    """

    def __init__(self, file: TraceFile, name: str, process: int, on_full: Callable[[], None]) -> None:
        self._file, self._on_full = file, on_full
        self._tracks = READY
        self._tracks_of: dict[
            tuple[str, int], list[tuple[int, float]]
        ] = {}  # by slot: tracks, and until when each is busy
        # Of samples that are not delivered yet: by epoch, and by lane, which works on a sample once.
        # Decision: it keeps chunks, not single samples, with which a trace of cheap samples takes twice the time.
        self._arrows: dict[int, dict[str, list[_Arrow]]] = defaultdict(lambda: defaultdict(list))
        self._last_arrow = 0  # number of the last arrow; they are counted from 1
        self._samples_ready = 0  # prepared and not delivered
        self._full = False
        self._in_step = False  # the training loop is at its step
        self._epoch: int | None = None
        self._hear: dict[type, Callable[[Any], None]] = {
            f.EpochBegan: self._began,
            f.BatchAsked: self._asks,
            f.Worked: self._worked,
            f.Stalled: self._stalled,
            f.BatchDelivered: self._delivered,
            f.Failed: self._failed,
            f.Died: self._died,
            f.EpochEnded: self._ended,
        }
        top = self._described(PROCESS, name)
        top.track_descriptor.process.pid = process
        top.track_descriptor.process.process_name = name
        self._write(top)
        for rank, (track, called) in enumerate(((EPOCHS, "epochs"), (LOOP, "training loop"), (READY, "samples ready"))):
            packet = self._described(track, called, PROCESS, rank)
            if track == READY:
                packet.track_descriptor.counter.unit_name = "samples"
            self._write(packet)

    def __call__(self, fact: f.Fact) -> None:
        if not self._full:
            self._hear[type(fact)](fact)

    # --- facts ----------------------------------------------------------------------------------------------

    def _began(self, fact: f.EpochBegan) -> None:
        self._close_step(fact.at)
        if self._epoch is not None:  # it was left in the middle, and what was ready of it is gone
            self._arrows.clear()
            self._samples_ready = 0
        self._close_epoch(fact.at)
        self._epoch = fact.epoch
        packet = self._event(_BEGIN, EPOCHS, fact.at, f"epoch {fact.epoch}")
        if fact.samples is not None:
            _annotate(packet, samples=fact.samples)
        self._write(packet)

    def _asks(self, fact: f.BatchAsked) -> None:
        self._close_step(fact.at)

    def _stalled(self, fact: f.Stalled) -> None:
        self._write(self._event(_BEGIN, LOOP, fact.begin, f"wait: {fact.cause}"))
        self._write(self._event(_END, LOOP, fact.end))

    def _delivered(self, fact: f.BatchDelivered) -> None:
        self._close_step(fact.at)
        self._samples_ready -= fact.samples
        packet = self._event(_BEGIN, LOOP, fact.at, "step")
        _annotate(packet, epoch=fact.epoch, batch=fact.number, samples=fact.samples, wait_ms=1e3 * fact.wait_s)
        if fact.padded:
            _annotate(packet, padded=fact.padded)
        event = packet.track_event
        event.flow_ids.extend(self._end_arrows(fact.epoch, fact.positions))
        event.extra_counter_track_uuids.append(READY)
        event.extra_counter_values.append(self._samples_ready)
        self._write(packet)
        self._in_step = True

    def _failed(self, fact: f.Failed) -> None:
        packet = self._event(_INSTANT, LOOP, fact.at, "failed samples")
        _annotate(packet, epoch=fact.epoch, samples=fact.samples, skipped=fact.skipped)
        self._write(packet)
        self._samples_ready = max(
            0, self._samples_ready - fact.samples - fact.skipped
        )  # without workers nothing is ready before

    def _died(self, fact: f.Died) -> None:
        self._write(self._event(_INSTANT, LOOP, fact.at, "worker hung" if fact.hung else "worker died"))

    def _ended(self, fact: f.EpochEnded) -> None:
        self._close_step(fact.at)
        self._arrows.pop(fact.epoch, None)
        self._close_epoch(fact.at)
        self._file.flush()

    def _close_step(self, at: float) -> None:
        if self._in_step:
            self._write(self._event(_END, LOOP, at))
        self._in_step = False

    def _close_epoch(self, at: float) -> None:
        if self._epoch is not None:
            self._write(self._event(_END, EPOCHS, at))
        self._epoch = None

    def _worked(self, fact: f.Worked) -> None:
        begin, track = self._track_for(fact)
        arrow = self._new_arrow(self._arrows[fact.epoch][fact.lane], fact.positions) if fact.prepared else 0
        groups = [(fact.samples, fact.end)]
        if fact.ends is not None and fact.samples == len(fact.ends):
            groups = [(len(list(same)), end) for end, same in groupby(fact.ends)]
        first, at = fact.positions[0][0] if fact.positions else -1, 0
        for count, end in groups:
            name = ("sample" if count == 1 else "samples") if fact.prepared else "for another lane, or joining a batch"
            packet = self._event(_BEGIN, track, begin, name)
            queued_ms = 1e3 * (fact.begin - fact.sent)
            _annotate(packet, epoch=fact.epoch, position=first + at, samples=count, queued_ms=queued_ms)
            if fact.handed:
                _annotate(packet, handed_over=fact.handed)
            if arrow:
                packet.track_event.flow_ids.append(arrow)
            begin, at = max(begin, end), at + count
            self._write(packet)
            self._write(self._event(_END, track, begin))
        if fact.prepared:
            self._samples_ready += fact.samples - fact.handed

    # --- tracks and arrows ----------------------------------------------------------------------------------

    def _track_for(self, fact: f.Worked) -> tuple[float, int]:
        """Chooses a track of the slot that is free, or adds one: a device works on several micro-batches at once.

        Returns when the work begins on it, and the track.
        """
        tracks = self._tracks_of.setdefault((fact.lane, fact.worker), [])
        for at, (track, until) in enumerate(tracks):
            if until <= fact.begin + _OVERLAP_S:
                tracks[at] = track, fact.end
                return max(until, fact.begin), track
        self._tracks += 1
        tracks.append((self._tracks, fact.end))
        self._write(self._described(self._tracks, f"{fact.lane} {fact.worker}", PROCESS, 10 + fact.worker))
        return fact.begin, self._tracks

    def _new_arrow(self, arrows: list[_Arrow], positions: Sequence[Span]) -> int:
        """Registers an arrow from work on these positions to their batches. Returns its number; 0 if there are none."""
        self._last_arrow += bool(positions)
        for lo, hi in positions:
            insort(arrows, (lo, hi, self._last_arrow))
        return self._last_arrow if positions else 0

    def _end_arrows(self, epoch: int, positions: Sequence[Span]) -> list[int]:
        """Cuts the positions of a batch off the arrows. Returns the rising numbers of those that led to it."""
        found = set[int]()
        for arrows in self._arrows[epoch].values():
            for lo, hi in positions:
                at = max(0, bisect_left(arrows, (lo, 0, 0)) - 1)
                while at < len(arrows) and arrows[at][0] < hi:
                    begin, end, arrow = arrows[at]
                    if lo < end:
                        found.add(arrow)
                        arrows[at : at + 1] = [(begin, lo, arrow)] * (begin < lo) + [(hi, end, arrow)] * (hi < end)
                    at += begin < lo
        return sorted(found)

    # --- packets --------------------------------------------------------------------------------------------

    def _described(self, track: int, name: str, parent: int = 0, rank: int = 0) -> Any:
        packet = self._file.packet()
        packet.track_descriptor.uuid = track
        if parent:
            packet.track_descriptor.name = name
            packet.track_descriptor.parent_uuid = parent
            packet.track_descriptor.sibling_order_rank = rank
        else:
            packet.track_descriptor.child_ordering = packet.track_descriptor.EXPLICIT
        return packet

    def _event(self, kind: int, track: int, at: float, name: str = "") -> Any:
        packet = self._file.packet(at)
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        if name:
            packet.track_event.name = name
        return packet

    def _write(self, packet: Any) -> None:
        if not self._full and not self._file.write(packet):
            self._full = True
            self._file.flush()
            self._on_full()


def _annotate(packet: Any, **values: float) -> None:
    for name, value in values.items():
        annotation = packet.track_event.debug_annotations.add(name=name)
        if isinstance(value, int):
            annotation.int_value = value
        else:
            annotation.double_value = value
