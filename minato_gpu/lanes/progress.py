"""A worker's progress with its task, and the finished samples that are not reported yet."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, thread_time

from minato_gpu.lanes.base import Item, Part, Task
from minato_gpu.memory.completions import End

TELL_S = 300e-6  # what is finished is reported after so long: costly samples at once, cheap ones together
TELL_ROWS_S = 0.1  # the same, of samples in rows of a batch that waits for all of them
_WORTH_S = 1e-4  # waiting that is counted apart in a larger chunk
_FEW = 16  # a larger chunk is one of cheap samples, where asking the kernel would cost as much
COSTLY_S = 100e-6  # the time of each sample is reported where one took longer


class LeaseProgress:
    """The samples of one task that are ready: their ``Item``s and the seconds that each took.

    ``delay``: seconds that this thread has waited for a core so far (see cpu_time.py).
    """

    def __init__(self, task: Task, delay: Callable[[], float]) -> None:
        self.task = task
        self.size = sum(len(piece.keys) for piece in task.pieces)
        self.done = 0  # samples that are ready
        self.reported = 0
        self.items: list[Item] = []
        self.times: list[float] = []  # an item counts once its time is there
        self.parts: list[Part | None] | None = None  # times of samples' parts, for pipelines with split points
        self.layout: bytes | None = None
        self.has_described = False  # the layout, which is reported once
        self.nbytes = 0  # bytes of samples that are not in their rows, counted where the task has a credit
        self.returned = False  # what is not begun, as the credit is used up
        self.prepared = 0  # samples of a batch that is composed
        self.begin = self.now = perf_counter()
        self.unseeded = False  # whether its samples are prepared without seeds of their own
        self.write_rows: Callable[[], None] | None = None  # writes what is kept of finished samples into their rows
        self.shift = 0  # from the number of a sample to its mark
        self._every = TELL_S
        self.report_at = self.begin + self._every
        self.delayed = self.size <= _FEW  # whether time spent waiting for a core is counted apart, for each sample
        self.share = 0.0  # seconds of each sample that were spent before, on all of its piece together
        self._delay = delay
        self._before, self._ran = delay(), thread_time() if self.delayed else 0.0
        self._waited = 0.0

    def tell_every(self, seconds: float) -> None:
        """Has finished samples reported once ``seconds`` have passed since the last report; 0.0: each at once."""
        self._every = seconds
        self.report_at = self.now + seconds

    def tell_each(self) -> None:
        """Has each sample reported as soon as it is ready, with what it took on a core."""
        self.tell_every(0.0)
        self.delayed, self._before, self._ran = True, self._delay(), thread_time()

    def add(self, item: Item) -> None:
        """Adds a sample that is ready, and where it is stored."""
        now = perf_counter()
        took = now - self.now
        if self.delayed:
            before, self._before = self._before, self._delay()
            ran, self._ran = self._ran, thread_time()
            # the kernel may tell only now of an earlier wait: what the sample has run it has not waited
            waited = max(0.0, min(self._before - before, took - (self._ran - ran), took - 1e-7))
            self._waited += waited
            took -= waited
        self.items.append(item)
        self.now = now
        self.times.append(took + self.share)
        self.done += 1

    def fetched(self, count: int) -> None:
        """Notes that ``count`` samples have just been fetched at once: what that took is shared out evenly to them."""
        now = perf_counter()
        self.share, self.now = (now - self.now) / count, now
        if self.delayed:
            self._before, self._ran = self._delay(), thread_time()

    def rewind(self) -> list[Item]:
        """Forgets what is not reported; returns its ``Item``s."""
        items = self.items.copy()
        self.write_rows = None
        self.nbytes -= sum(item.nbytes for item in items if item is not None)
        self.items.clear()
        self.times.clear()
        if self.parts is not None:
            self.parts.clear()
        self._waited = 0.0
        self.done = self.reported
        return items

    def write(self) -> None:
        """Writes finished samples that are held back into their rows, by ``write_rows``; what that takes is spread over
        the times of all that are not reported."""
        assert self.write_rows is not None
        self.write_rows()
        now = perf_counter()
        each, self.now = (now - self.now) / len(self.times), now
        self.times[:] = [took + each for took in self.times]

    def told(self) -> tuple[list[float], End, float]:
        """Notes that the ready samples are reported.

        Returns the seconds that each took, when each was ready (a single time if that is about the same), and the
        seconds of all, waits for a core included.
        """
        times, count = self.times.copy(), len(self.times)
        if not self.delayed and count > 2:
            self._take_out_waits(times)
        ends: End = self.now
        if count > 1 and max(times) > COSTLY_S:
            ends = self._ends(times)
        self.items.clear()  # in place: whoever appends to them holds them
        self.times.clear()
        if self.parts is not None:
            self.parts.clear()
        elapsed = sum(times) + self._waited
        self._waited = 0.0
        self.reported += count
        self.report_at = self.now + self._every
        return times, ends, elapsed

    def _take_out_waits(self, times: list[float]) -> None:
        """Takes the thread's waits for a core out of the times of those samples that took longer than most.

        Nobody knows at which sample it waited, and of one or two samples nobody could say.
        """
        before, self._before = self._before, self._delay()
        waited = self._before - before
        if waited < _WORTH_S:
            return
        rising = sorted(range(len(times)), key=times.__getitem__)
        usual = times[rising[len(times) // 2]]
        for at in reversed(rising):
            over = min(times[at] - usual, waited)
            if over <= 0:
                break
            times[at] -= over
            waited -= over
            self._waited += over

    def _ends(self, times: list[float]) -> list[float]:
        """Returns when each sample was ready, the last one now; cheap ones with the costly one that came next."""
        waited, end, found = self._waited / len(times), self.now, list[float]()
        together = end
        for took in reversed(times):
            found.append(together)
            end -= took + waited
            if took > COSTLY_S:
                together = end
        found.reverse()
        return found
