"""Looks after workers that have died, and after workers and device lanes that hang."""

from __future__ import annotations

import select
from contextlib import suppress
from time import perf_counter

from minato_gpu.engine.pump import Pump
from minato_gpu.faults.watchdog import Watchdog, WorkerHung
from minato_gpu.lanes.processes import WorkerDied
from minato_gpu.util.messages import LOGGER
from minato_gpu.util.threads import await_event

_ONCE = select.EPOLLIN | select.EPOLLONESHOT


class WorkerSupervisor:
    """Replaces workers that die or hang, or raises the error; the pump thread waits here for what it has to do."""

    def __init__(self, pump: Pump, wake: int, *, replaces: bool, watchdog: Watchdog | None) -> None:
        """``wake``: the event descriptor that wakes the pump thread."""
        self._pump = pump
        self._wake = wake
        self._replaces = replaces  # else a worker that dies is an error
        self._watchdog = watchdog
        self._reader = -1 if pump.reads is None else pump.reads.fd  # descriptor of the reader process
        self.heard = False  # the reader process woke the pump thread the last time that it waited
        self.exit_fds = frozenset(fd for lane in pump.lanes.values() for fd in lane.fault_fds())
        # error found while the consumer was in its training step; it may never need the worker
        self.broken: BaseException | None = None
        self._watch = select.epoll()
        self._watch.register(wake, select.EPOLLIN)
        for fd in self.exit_fds if replaces else ():
            self._watch.register(fd, _ONCE)
        if self._reader >= 0:
            self._watch.register(self._reader, select.EPOLLONESHOT)  # see ``hear_reader``
        self._watches = replaces or watchdog is not None or self._reader >= 0  # for more than to be woken

    def raise_broken(self) -> None:
        """Raises, once, the error that was kept while the consumer was in its training step; does nothing without
        one."""
        broken, self.broken = self.broken, None
        if broken is not None:
            raise broken

    def next_look(self, now: float) -> float | None:
        """Returns the time of the next look for hanging workers; None without a limit."""
        return None if self._watchdog is None else self._watchdog.next_look(now)

    def wait(self, until: float | None = None) -> bool:
        """Waits until the pump thread is woken, the time ``until`` has come, the reader process reports, a worker
        ends, or one may have hung.

        Returns whether to ``keep_watch``.
        """
        if until is None and not self._watches:
            await_event(self._wake)
            return False
        now, looks = perf_counter(), [] if until is None else [until]
        if self.broken is None:
            for fd in self.exit_fds if self._replaces else ():
                self._watch.modify(fd, _ONCE)
            looks += [] if (look := self.next_look(now)) is None else [look]
        ready = [fd for fd, _ in self._watch.poll(max(0.0, min(looks) - now) if looks else None)]
        if self._wake in ready:
            await_event(self._wake)
        self.heard = self._reader in ready
        return self.broken is None and (not ready or not self.exit_fds.isdisjoint(ready))

    def hear_reader(self) -> None:
        """Has the reader process wake the pump thread, once, when it next reports; what has come meanwhile counts."""
        with suppress(FileNotFoundError):  # it has ended
            self._watch.modify(self._reader, _ONCE)

    def keep_watch(self) -> None:
        """Looks after workers while the consumer is in its training step. Deaths and hangs that are errors are kept
        until ``raise_broken``."""
        try:
            if self._replaces:
                self._pump.receive()
            self.look_for_hangs()
            if self._replaces:
                self.check_workers()  # last: nothing will report again what has been reported meanwhile
        except (WorkerDied, WorkerHung) as error:
            self.keep(error)

    def tend(self) -> None:
        """Replaces workers that are known to have ended.

        Does nothing if workers are not replaced: the death is then raised once the consumer needs the worker's samples.
        """
        if self._replaces:
            try:
                self.check_workers()
            except WorkerDied as error:  # without its frames, which would keep the consumer's iterator
                self.keep(error.with_traceback(None))

    def keep(self, error: BaseException) -> None:
        """Keeps an error that was found during the consumer's step; of several the first is raised."""
        self.broken = self.broken or error

    def check_workers(self) -> None:
        """Replaces workers that are known to have ended.

        Raises WorkerDied if they are not replaced, one could not be, or another would do no better.
        """
        faults = self._pump.faults
        while faults:
            lane, fault = faults.popleft()
            if fault.start_error or not self._replaces:
                self._pump.shown.died(hung=bool(fault.hung))
                raise WorkerDied(fault.message())
            told = fault.message().rstrip()
            LOGGER.warning("%s%sIt is being replaced.", told, "\n" if "\n" in told else " ")
            self._pump.lost(lane, fault)

    def look_for_hangs(self) -> None:
        """If it is time, looks for workers that hang: kills those that can be replaced, raises WorkerHung else."""
        now = perf_counter()
        if self._watchdog is None or now < self._watchdog.next_look(now):
            return
        self._pump.ask()  # a worker that waits for room to report has not hung
        for hung in self._watchdog.look(perf_counter(), self._pump.at_work):
            lane = self._pump.lanes[hung.lane]
            text = self._watchdog.words(hung, self._pump.run.in_words(hung.claim, hung.lane))
            if not (self._replaces and lane.can_kill):
                self._pump.shown.died(hung=True)
                raise WorkerHung(text + lane.advice)
            lane.kill(hung.worker, text)

    def close(self) -> None:
        """Stops watching, once the pump thread has ended."""
        self._watch.close()
