"""A trace of every sample's way, for Perfetto's viewer (ui.perfetto.dev), as events of Chrome's trace format.

Tracks: the epochs; the training loop with its waits by cause, and its step with each batch; every slot of every lane
with the samples that it worked on, costly ones each by itself and cheap ones by the chunk; how many samples are ready
beyond each batch. An arrow leads from the work to the step with the batch that its samples came in.
"""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Any

from minato_gpu.observe import facts as f
from minato_gpu.samples import JSON
from minato_gpu.scheduling.spans import Span
from minato_gpu.util.messages import LOGGER

LIMIT = 256 << 20  # bytes: a million samples that are recorded one by one
EPOCHS, LOOP = 1, 2  # tracks; those of slots follow
_BUFFERED = 1 << 16  # bytes that are written at once
_OVERLAP_S = 50e-6  # two clocks' difference: work of one slot that overlaps more goes to another track
_END = b"\n]\n"

_Arrow = tuple[int, int, int, float]  # first position, position after the last, track of the work, and a time in it


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
    trace = Trace(file, "minato_gpu" if rank is None else f"minato_gpu, rank {rank}", full)
    facts.subscribe(trace)


class TraceFile:
    """A file of events of at most ``limit`` bytes: a JSON array, whose end may be missing where a process was killed.

    A file at ``path`` is overwritten; if another trace is being written to it, a number is added to the name. Raises
    OSError if it cannot be written.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._room = limit - len(_END)
        self._process = os.getpid()
        self._buffer = bytearray()
        self._separator = b"[\n"
        self.path, self._file = _opened(path)
        if self.path != path:
            LOGGER.warning("another trace is being written to %s; this one goes to %s", path, self.path)

    def write(self, event: dict[str, JSON]) -> bool:
        """Appends the event, with this process's id. Returns False if there is no room for it."""
        data = self._separator + json.dumps({**event, "pid": self._process}, separators=(",", ":")).encode()
        if len(data) > self._room:
            return False
        self._room -= len(data)
        self._separator = b",\n"
        self._buffer += data
        if len(self._buffer) >= _BUFFERED:
            self.flush()
        return True

    def flush(self) -> None:
        """Writes out what is buffered; does nothing in a process forked from the writer."""
        data, self._buffer = memoryview(self._buffer), bytearray()
        if self._file < 0 or os.getpid() != self._process:
            return
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        """Ends the array and closes the file. Idempotent."""
        if self._file >= 0:
            self._buffer += _END
            try:
                self.flush()
            finally:
                if os.getpid() == self._process:
                    fcntl.flock(self._file, fcntl.LOCK_UN)  # workers that still end have it open, too
                os.close(self._file)
                self._file = -1


def _opened(path: Path) -> tuple[Path, int]:
    for number in count(1):
        name = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)
            return name, file
        except BlockingIOError:
            os.close(file)
        except BaseException:
            os.close(file)
            raise
    raise AssertionError


class Trace:
    """A subscriber to a loader's facts: called with each of them, it writes them to ``file`` as events.

    ``name``: the process's name in the viewer. ``on_full`` is called once, when an event has no room any more.
    """

    def __init__(self, file: TraceFile, name: str, on_full: Callable[[], None]) -> None:
        self._file, self._on_full = file, on_full
        self._tracks = LOOP
        # by slot: tracks, and until when each is busy
        self._tracks_of: dict[tuple[str, int], list[tuple[int, float]]] = {}
        # Of samples that are not delivered yet: by epoch, and by lane, which works on a sample once.
        # Decision: it keeps chunks, not single samples, with which a trace of cheap samples takes twice the time.
        self._arrows: dict[int, dict[str, list[_Arrow]]] = defaultdict(lambda: defaultdict(list))
        self._last_arrow = 0  # number of the last arrow
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
        self._write({"ph": "M", "name": "process_name", "args": {"name": name}})
        self._name_track(EPOCHS, "epochs")
        self._name_track(LOOP, "training loop")

    def __call__(self, fact: f.Fact) -> None:
        """Records a fact."""
        self._hear[type(fact)](fact)

    # --- facts ----------------------------------------------------------------------------------------------

    def _began(self, fact: f.EpochBegan) -> None:
        self._close_step(fact.at)
        if self._epoch is not None:  # it was left: what was prepared of it will not be delivered
            self._arrows.clear()
            self._samples_ready = 0
        self._close_epoch(fact.at)
        self._epoch = fact.epoch
        self._event("B", EPOCHS, fact.at, f"epoch {fact.epoch}", samples=fact.samples)

    def _asks(self, fact: f.BatchAsked) -> None:
        self._close_step(fact.at)

    def _stalled(self, fact: f.Stalled) -> None:
        self._slice(LOOP, fact.begin, fact.end, f"wait: {fact.cause}")

    def _delivered(self, fact: f.BatchDelivered) -> None:
        self._close_step(fact.at)
        self._samples_ready -= fact.samples
        values = {"batch": fact.number, "samples": fact.samples, "padded": fact.padded, "wait_ms": 1e3 * fact.wait_s}
        self._event("B", LOOP, fact.at, "step", epoch=fact.epoch, **values)
        for track, at in self._end_arrows(fact.epoch, fact.positions):
            self._last_arrow += 1
            arrow = {"name": "came in", "cat": "samples", "id": self._last_arrow}
            self._write({"ph": "s", **arrow, "tid": track, "ts": 1e6 * at})
            self._write({"ph": "f", "bp": "e", **arrow, "tid": LOOP, "ts": 1e6 * fact.at})
        self._write({"ph": "C", "name": "samples ready", "ts": 1e6 * fact.at, "args": {"samples": self._samples_ready}})
        self._in_step = True

    def _failed(self, fact: f.Failed) -> None:
        self._event("i", LOOP, fact.at, "failed samples", epoch=fact.epoch, samples=fact.samples, skipped=fact.skipped)
        # without workers nothing is ready before
        self._samples_ready = max(0, self._samples_ready - fact.samples - fact.skipped)

    def _died(self, fact: f.Died) -> None:
        self._event("i", LOOP, fact.at, "worker hung" if fact.hung else "worker died")

    def _ended(self, fact: f.EpochEnded) -> None:
        self._close_step(fact.at)
        self._arrows.pop(fact.epoch, None)
        self._close_epoch(fact.at)
        self._file.flush()

    def _close_step(self, at: float) -> None:
        if self._in_step:
            self._event("E", LOOP, at)
        self._in_step = False

    def _close_epoch(self, at: float) -> None:
        if self._epoch is not None:
            self._event("E", EPOCHS, at)
        self._epoch = None

    def _worked(self, fact: f.Worked) -> None:
        begin, track = self._track_for(fact)
        groups = [(fact.samples, fact.end)]
        if fact.ends is not None and fact.samples == len(fact.ends):
            groups = [(len(list(same)), end) for end, same in groupby(fact.ends)]
        position = fact.positions[0][0] if fact.positions else -1
        values = {"epoch": fact.epoch, "queued_ms": 1e3 * (fact.begin - fact.sent), "handed_over": fact.handed}
        middle = begin
        for samples, end in groups:
            name = (
                ("sample" if samples == 1 else "samples") if fact.prepared else "for another lane, or joining a batch"
            )
            middle = (begin + max(begin, end)) / 2
            self._slice(track, begin, max(begin, end), name, position=position, samples=samples, **values)
            begin, position = max(begin, end), position + samples
        if fact.prepared:
            self._samples_ready += fact.samples - fact.handed
            for lo, hi in fact.positions:
                insort(self._arrows[fact.epoch][fact.lane], (lo, hi, track, middle))

    # --- tracks and arrows ----------------------------------------------------------------------------------

    def _track_for(self, fact: f.Worked) -> tuple[float, int]:
        """Chooses a track of the slot that is free, or adds one: a device works on several micro-batches at once.

        Returns when the work begins there, in seconds, and the track. The begin is put off until the end of the track's
        last work, which two clocks may place later.
        """
        tracks = self._tracks_of.setdefault((fact.lane, fact.worker), [])
        for at, (track, until) in enumerate(tracks):
            if until <= fact.begin + _OVERLAP_S:
                tracks[at] = track, fact.end
                return max(until, fact.begin), track
        self._tracks += 1
        tracks.append((self._tracks, fact.end))
        self._name_track(self._tracks, f"{fact.lane} {fact.worker}", 10 + fact.worker)
        return fact.begin, self._tracks

    def _end_arrows(self, epoch: int, positions: Sequence[Span]) -> list[tuple[int, float]]:
        """Cuts the positions of a batch off the arrows. Returns the track, and a time, of all work that led to it."""
        found = set[tuple[int, float]]()
        for arrows in self._arrows[epoch].values():
            for lo, hi in positions:
                at = max(0, bisect_left(arrows, (lo,)) - 1)
                while at < len(arrows) and arrows[at][0] < hi:
                    begin, end, track, moment = arrows[at]
                    if lo < end:
                        found.add((track, moment))
                        before, after = (begin, lo, track, moment), (hi, end, track, moment)
                        arrows[at : at + 1] = [before] * (begin < lo) + [after] * (hi < end)
                    at += begin < lo
        return sorted(found)

    # --- events ---------------------------------------------------------------------------------------------

    def _name_track(self, track: int, name: str, rank: int | None = None) -> None:
        for key, value in (("name", name), ("sort_index", track if rank is None else rank)):
            self._write({"ph": "M", "name": f"thread_{key}", "tid": track, "args": {key: value}})

    def _event(self, phase: str, track: int, at: float, name: str = "", **values: float | None) -> None:
        self._write({"ph": phase, "tid": track, "ts": 1e6 * at, "name": name, "args": values})

    def _slice(self, track: int, begin: float, end: float, name: str, **values: float) -> None:
        duration = 1e6 * (end - begin)
        self._write({"ph": "X", "tid": track, "ts": 1e6 * begin, "dur": duration, "name": name, "args": values})

    def _write(self, event: dict[str, JSON]) -> None:
        if not self._full and not self._file.write(event):
            self._full = True
            self._file.flush()
            self._on_full()
