"""The lanes of a simulated loader: slots that do chunks, and how far each sample has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from minato_gpu.lab.simulation.work import Work
from minato_gpu.scheduling import messages as m


class SampleProgress:
    """The true costs of the samples, and the split point that each has come to (none: it has not begun).

    For example, with a split point at stage 2, before which the CPU takes 3 of a sample's 8 seconds, ``seconds`` of the
    sample is 8, or 3 as far as that split point; once it ``came_to`` it, 5, or what the rest takes on a device.
    """

    def __init__(self, work: Work) -> None:
        self._cpu: list[float] = work.cpu.tolist()
        self._device: list[float] = [] if work.device is None else work.device.tolist()
        self._cuts: dict[int, tuple[list[float], list[float]]] = {
            cut.split: (cut.cpu.tolist(), cut.device.tolist()) for cut in work.cuts
        }
        self._split: dict[int, int] = {}

    def came_to(self, serials: Iterable[int], split: int) -> None:
        """Notes that these samples wait at ``split`` for another lane."""
        self._split.update(dict.fromkeys(serials, split))

    def seconds(self, serial: int, device: bool, stop: int = -1) -> float:
        """Returns the seconds of the sample's rest on a slot, on the CPU up to split point ``stop`` (-1: its end)."""
        at = self._split.get(serial)
        if device:
            return self._device[serial] if at is None else self._cuts[at][1][serial]
        upto = self._cpu[serial] if stop < 0 else self._cuts[stop][0][serial]
        return upto if at is None else upto - self._cuts[at][0][serial]

    def next_stop(
        self, serial: int, splits: Iterable[int], begin: float, now: float, end: float
    ) -> tuple[int, float] | None:
        """Returns the first of ``splits`` that the sample comes to, at ``now`` or later and before ``end``, and when.

        The sample has run on the CPU since ``begin``; ``splits`` rise. None: it comes to none of them by then.
        """
        at = self._split.get(serial, -1)
        if at >= 0:
            begin -= self._cuts[at][0][serial]
        for split in splits:
            time = begin + self._cuts[split][0][serial]
            if split > at and now <= time < end:
                return split, time
        return None


class ChunkRun:
    """A chunk on its slot."""

    __slots__ = ("_serials", "begin", "chunk", "ends", "version")

    def __init__(self, chunk: m.Chunk, begin: float, ends: list[float]) -> None:
        self.chunk = chunk
        self.begin = begin
        self.ends = ends  # when each sample becomes ready
        self.version = 0
        self._serials = [serial for lo, hi in chunk.spans for serial in range(lo, hi)]

    def done(self, now: float) -> int:
        """Returns how many samples are ready by now."""
        return sum(end <= now for end in self.ends)

    def serials(self) -> list[int]:
        """Returns its samples, but for those that were taken back."""
        return self._serials[: len(self.ends)]


class VirtualLane:
    """Slots of one kind, which do chunks in the order in which these were sent. It takes the commands of a lane
    (lanes/contract.py), each with the time; what it answers are events for the scheduler.

    ``running``: chunks on a slot, by number. ``ends`` is called with the time at which one of them will end, which is
    true as long as its ``version`` stays.
    """

    def __init__(
        self, name: str, work: Work, samples: SampleProgress, ends: Callable[[float, VirtualLane, ChunkRun], None]
    ) -> None:
        self.name, self.kind = name, m.DEVICE if name.startswith(m.DEVICE) else m.CPU
        self.running: dict[int, ChunkRun] = {}
        self._samples, self._ends = samples, ends
        self._run_s = work.device_run_s if self.kind == m.DEVICE else 0.0
        self._header_s = work.header_s or 0.0
        self.prepared = 0  # samples
        self._shows_one = bool(work.cuts)  # of a chunk of one sample, too, how far it has come
        self._free = 0  # slots
        self._queue: deque[m.Chunk] = deque()

    def open(self, now: float) -> None:
        """Makes one more slot ready."""
        self._free += 1
        self._start(now)

    def send(self, now: float, chunk: m.Chunk) -> None:
        """Takes a chunk, which waits for a slot."""
        self._queue.append(chunk)
        self._start(now)

    def _start(self, now: float) -> None:
        while self._free and self._queue:
            self._free -= 1
            chunk = self._queue.popleft()
            device, time, ends = self.kind == m.DEVICE, now + self._run_s, []
            for lo, hi in chunk.spans:
                for serial in range(lo, hi):
                    reads = chunk.kind == "inspect"
                    time += self._header_s if reads else self._samples.seconds(serial, device, chunk.stop)
                    ends.append(time)
            run = self.running[chunk.number] = ChunkRun(chunk, now, ends)
            self._ends(time, self, run)

    def end(self, now: float, run: ChunkRun) -> None:
        """Ends a chunk: its slot takes the next one."""
        del self.running[run.chunk.number]
        self.prepared += len(run.ends) if run.chunk.kind == "run" else 0
        if run.chunk.stop >= 0:
            self._samples.came_to(run.serials(), run.chunk.stop)
        self.open(now)

    def hand_over(self, now: float, number: int, splits: Sequence[int]) -> None:
        """Stops a chunk's one sample at the next of the split points, if there is one before its end.

        ``splits`` rise. A chunk that waits for a slot, has ended or has several samples is left as it is.
        """
        run = self.running.get(number)
        if run is None or len(run.ends) != 1:
            return
        serial = run.chunk.spans[0][0]
        found = self._samples.next_stop(serial, splits, run.begin, now, run.ends[0])
        if found is not None:
            split, time = found
            run.chunk = replace(run.chunk, stop=split)
            run.ends = [time]
            self._changed(run)

    def revoke(self, now: float, number: int, keep: int) -> Iterator[m.Revoked]:
        """Takes back samples of a chunk on a slot: those from offset ``keep`` on that have not begun. Yields a Revoked
        if there are any. A chunk that waits for a slot, or has ended, is left as it is."""
        run = self.running.get(number)
        if run is None:
            return
        keep = max(keep, run.done(now) + 1)
        if keep < len(run.ends):
            del run.ends[keep:]
            self._changed(run)
            yield m.Revoked(now, number, keep)

    def look(self, now: float) -> Iterator[m.Running]:
        """Yields how far unfinished chunks of several samples (with split points, also of one) have come on the CPU."""
        for run in list(self.running.values()) if self.kind == m.CPU else ():
            if run.chunk.kind == "run" and (len(run.ends) > 1 or self._shows_one):
                done = run.done(now)
                if done < len(run.ends):
                    yield m.Running(now, run.chunk.number, done, now - (run.ends[done - 1] if done else run.begin))

    def stop(self) -> None:
        """Stops the lane: none of its chunks will end, nor any that is sent to it."""
        self._free = 0
        self.running.clear()

    def _changed(self, run: ChunkRun) -> None:
        run.version += 1
        self._ends(run.ends[-1], self, run)
