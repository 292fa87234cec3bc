"""The engine: epochs through one set of lanes, for a consumer that waits or trains.

Whoever holds the lock *pumps*: reads the lanes' reports, tells the scheduler, does what it says. A consumer that
waits for its batch, or fetches batch after batch, pumps by itself. While it trains, a thread does: woken by workers
through an event descriptor where their reports need an answer (the board asks for attention only then), and by the
consumer when it leaves with a batch that was ready. What follows from a delivery is then off the training loop's way,
and a loop that only fetches never fights a background thread for the interpreter lock.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from time import perf_counter

from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL

from minato_gpu.engine.epochs import Epoch, Epochs
from minato_gpu.engine.handover import Handover
from minato_gpu.engine.host_share import PERIOD_S, HostShare
from minato_gpu.engine.parts import Parts
from minato_gpu.engine.pump import Pump
from minato_gpu.engine.supervision import WorkerSupervisor
from minato_gpu.memory.status_board import ATTENTION, CONSUMER, NOBODY, PUMP, RING_FROM
from minato_gpu.observe.waits import Wait
from minato_gpu.samples import Value
from minato_gpu.sampling.epoch_batches import EpochBatches
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.spans import Span
from minato_gpu.util.threads import OwnThread
from minato_gpu.window.contract import NOTHING, Batches, EndOfEpoch, Judge
from minato_gpu.window.records import Batch

_LONGEST_SLEEP_S = 1.0  # Python sees a signal that came just before poll() only when poll() returns
_LOOK_S = 10e-3  # for so long a wait goes on for the cause that it had
_TRAINS_S = 500e-6  # a consumer that is away for longer does something with its batches


class Engine(Batches):
    """Runs epochs through one set of lanes, one after the other."""

    def __init__(self, parts: Parts) -> None:
        self._links = parts.links
        self.pump = pump = Pump(parts)
        self.assembly = parts.assembly
        self.epochs = Epochs(pump, parts)
        settings = parts.settings
        replaces = settings.replaces and not settings.streams and any(lane.can_kill for lane in pump.lanes.values())
        self._minder = WorkerSupervisor(pump, parts.links.wake, replaces=replaces, watchdog=parts.watchdog)
        self._handover = Handover(parts)
        self._items = self._handover.items
        self._timeout = settings.timeout
        self._streams = settings.streams
        self._process = os.getpid()
        self._lock = threading.Lock()
        self.closed = False  # whether it has ended
        self.on_close: Callable[[], None] = lambda: None
        self._poll = select.poll()
        reads = () if pump.reads is None else (pump.reads.fd,)
        loading = () if self.assembly.loading is None else (self.assembly.loading.host.issued_fd,)
        for fd in (parts.links.consumer_wake, *self._minder.exit_fds, *loading, *reads):
            self._poll.register(fd, select.POLLIN)
        self.log = pump.shown
        self._left = 0.0  # when the consumer got its last batch
        self._longest_sleep_s = _LONGEST_SLEEP_S if parts.host_share is None else PERIOD_S
        self._count, self._share = parts.worker_count, parts.host_share
        self._thread = OwnThread(target=self._attend, name="minato-pump", daemon=True)
        self._thread.start()

    # --- epochs --------------------------------------------------------------------------------------------

    def begin(self, source: EpochBatches, expected: int | None, *, prefetched: bool) -> None:
        """Starts an epoch of ``expected`` samples (None: not known). Raises what its sampler raises.

        ``prefetched``: ``prefetch`` was given this very source, and the epoch goes on from there. Otherwise a new run
        begins, and what is left of an earlier epoch is given up.
        """
        with self._lock:
            self._items.left.clear()
            pump = self.pump
            if pump.estimates is not None:
                pump.estimates.begin_epoch()
            if prefetched:
                self.epochs.go_on(source.number)
            else:
                pump.new_run()
                self.epochs.start(source)
            self.assembly.expect(self.epochs.order, self.epochs[source.number].first_order)
            self.log = pump.shown = pump.run.logs[source.number]
            self.log.began(expected, perf_counter())
            if self._count is not None:
                self._count.begin(self.log.begin)
            if (counts := self._count or self._share) is not None:
                self.log.workers["at_work"] = counts.workers
            if not prefetched:
                pump.open_lanes()
            self.epochs.draw()
            self._settle()
            self._attention()

    def prefetch(self, source: EpochBatches) -> None:
        """Lets the window run on into the next epoch, once the current one's sampler has ended (see
        ``Epochs.drained``).

        Raises what its sampler raises; it is then not drawn from again until the epoch begins.
        """
        with self._lock:
            self.epochs.add(source, early=True)
            self.epochs.draw_ahead()
        self._leave_due()

    # --- the consumer's side -------------------------------------------------------------------------------

    def next(self, number: int, judge: Judge, asked: Callable[[], None]) -> Value:
        """Returns the next batch (see ``Batches``).

        Raises also RuntimeError after ``timeout`` seconds, for a broken lane, or in a process forked from the
        engine's; WorkerDied or WorkerHung for a worker that is not replaced; and EndOfEpoch once closed.
        """
        asked()
        started = perf_counter()
        self.delivered = None
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this iterator, and its workers, are those of process {self._process}, from which this one was "
                "forked: make another here with iter(loader)"
            )
        if self._items.left and self._items.epoch == number and not self.closed:
            return self._next_item(started)
        with self._lock:
            if self.closed:
                raise EndOfEpoch
            self.epochs.raised.raise_kept()
            epoch = self.epochs[number]
            batch, positions, trains = self._take(epoch, started)
        self.last_good = batch.good
        try:
            value = self._handover(self.log, epoch, batch, positions, judge, started)
        finally:
            if trains:
                self._leave_due()
            self._left = perf_counter()
        if batch.failure is None:
            return value if batch.size else NOTHING
        return self.assembly.value(batch)

    def _take(self, epoch: Epoch, started: float) -> tuple[Batch, list[Span], bool]:
        """Waits for the epoch's next batch and takes it; returns it and its positions. Raises as ``next``.

        Does what the delivery leaves to be done, unless it also returns True: then the pump thread is to do that, as
        the consumer trains meanwhile.
        """
        epochs, at_hand = self.epochs, self._at_hand(epoch)
        wait = None if at_hand else self._await(epoch, started)
        if epoch.end == epochs.order:
            self.log.ended(perf_counter())
            self._attention()
            raise EndOfEpoch
        batch = self.assembly.take(epochs.order)
        if wait is not None:
            self.log.longest_waits.add(wait, batch.number, batch.dealt)
        positions = self.delivered = epoch.positions(batch.dealt)
        away = started - self._left if batch.number else 0.0
        epochs.delivered(away, batch)
        # what a delivery leaves to be done may wait until batches are drawn again
        drawn = epochs.draw_on() or not at_hand or self.assembly.loading is not None
        if self._count is not None and self._count.delivered(
            perf_counter(), batch.size, self.pump.run.scheduler.idle_slots
        ):
            self._resize(self._count.workers)
        if self._share is not None:
            self._look_at_host(self._share)
        trains = drawn and at_hand and away > _TRAINS_S
        if drawn and not trains:
            self._links.board.words[ATTENTION] = NOBODY
            if wait is None:  # else reports have just been read
                self._pump()
            self._settle()
            self._attention()
        return batch, positions, trains

    def _next_item(self, started: float) -> Value:
        """Returns the next sample of the batch that was taken last, whose samples are delivered one by one."""
        try:
            self.delivered = self._items.span
            return self._items.next(self.log, started)
        finally:
            self._left = perf_counter()

    def _at_hand(self, epoch: Epoch) -> bool:
        """Returns whether the next batch is ready, or the epoch has ended."""
        return self.assembly.ready(self.epochs.order) or epoch.end == self.epochs.order

    def _await(self, epoch: Epoch, started: float) -> Wait | None:
        """Pumps until the next batch is ready, or the epoch turns out to be over.

        Returns the wait, with its causes; None if it was over at once.
        """
        self._listen()
        self.epochs.draw()  # where the sampler raised last time, or it would be waited for in vain
        self._settle()
        self._pump()
        if self._at_hand(epoch):
            return None
        asked, run = perf_counter(), self.pump.run
        run.handle(m.Asked(asked))
        wait = Wait(asked, run.scheduler.stall_cause(), self.assembly.window.places.copy())
        run.arrivals = wait.arrivals
        self.assembly.waiting(waits=True)
        try:
            while not self._at_hand(epoch):
                if perf_counter() - wait.looked > _LOOK_S:
                    wait.look(perf_counter(), run.scheduler.stall_cause())
                self.assembly.make_room()  # only now: what the consumer has had until now may have been in the way
                self._sleep(started)
                self._pump()
                while run.scheduler.window.grown:
                    self.epochs.draw_on()
                    if not self.epochs.due:
                        break
                    self._settle()
            self.pump.bell.await_nothing()
        finally:
            run.arrivals = None
            self.assembly.waiting(waits=False)
        wait.end(perf_counter())
        self.log.stalled(wait)
        if self._count is not None:
            for cause, seconds in wait.by_cause().items():
                self._count.waited(cause, seconds)
        return wait

    def _look_at_host(self, share: HostShare) -> None:
        """Puts as many workers to work as this rank's share of the host's cores is now."""
        if share.look(perf_counter(), self.pump.run.scheduler.batches_ready):
            self._resize(share.workers)

    def _resize(self, workers: int) -> None:
        """Puts so many workers to work from now on."""
        for lane in self.pump.lanes.values():
            lane.resize(workers)
        self.log.workers["at_work"] = workers

    def _listen(self, listener: int = CONSUMER) -> None:
        """Has ``listener`` woken by whatever is reported from now on; the caller looks at what was reported before."""
        self._links.board.words[RING_FROM] = 0
        self._links.board.words[ATTENTION] = listener
        self._links.board.fence()

    def _sleep(self, started: float) -> None:
        """Sleeps until a report arrives, a worker ends, or the scheduler wants to look at what runs.

        May return early. ``started``: when the consumer began to wait. Raises as ``next``.
        """
        now = perf_counter()
        wake = self.pump.run.scheduler.wake_at()
        if self._share is not None:
            self._look_at_host(self._share)
        self._minder.raise_broken()
        self.pump.check_lanes()
        end = started + self._timeout if self._timeout > 0 else None
        hangs = self._minder.next_look(now)
        if end is not None and now >= end:
            told = "".join(lane.stacks_at_work() for lane in self.pump.lanes.values())
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds{told}")
        until = min(t for t in (wake, end, hangs, now + self._longest_sleep_s) if t is not None)
        if self._links.board.words[ATTENTION] != CONSUMER:
            self._listen()
            return  # to look at what was reported before workers could see that
        if self.pump.faults:
            self._minder.check_workers()
        elif self.pump.listen():
            return
        else:
            self._poll.poll(max(0.0, 1e3 * (until - now)))
        if hangs is not None:
            self._minder.look_for_hangs()
        if wake is not None and perf_counter() >= wake:
            self.pump.look()

    def _leave_due(self) -> None:
        """Has the pump thread soon do the work that is due.

        If all workers are at work, the first one that reports wakes it: woken from here it would take this very core
        from the consumer, as workers keep all of them busy. Another lane that may be idle does not wait for that.
        """
        with self._lock:
            if not self.closed:
                self._listen(PUMP)
                if len(self.pump.lanes) > 1 or not self._links.board.all_busy():
                    os.eventfd_write(self._links.wake, 1)

    # --- pumping (with the lock held) ----------------------------------------------------------------------

    def _attend(self) -> None:
        """Runs the pump thread: serves while the consumer is away and the board asks for attention."""
        look_at: float | None = None
        while True:
            watch = self._minder.wait(look_at)
            with self._lock:
                if self.closed:
                    return
                try:
                    self._serve(watch)
                except Exception as error:  # this thread must live: later reports may need it
                    self._minder.keep(error)
                look_at = self._look_at()

    def _look_at(self) -> float | None:
        """Returns when the pump thread is to look at what runs; None if it need not.

        Batches that go to a device are to be complete before they are asked for, and not to wait for what is slow.
        """
        goes_on = self.assembly.loading is not None and self._links.board.words[ATTENTION] == PUMP
        return self.pump.run.scheduler.wake_at() if goes_on else None

    def _serve(self, watch: bool) -> None:
        """Does what is due; ``watch``: looks after workers, too."""
        if watch:
            self._minder.keep_watch()
            self._attention()
        if self.epochs.due or self._links.board.words[ATTENTION] or self._minder.heard or self.pump.loading:
            if self._share is not None:
                self._look_at_host(self._share)
            self._pump()  # first: which lanes are idle decides what is made of the room that a delivery has left
            self._settle()
            look_at = self._look_at()
            if look_at is not None and perf_counter() >= look_at:
                self.pump.look()
            self._attention()

    def _attention(self) -> None:
        """Asks workers to wake the pump thread if their reports will need an answer before the consumer is back."""
        words = self._links.board.words
        if not self.pump.needs_attention:
            words[ATTENTION] = NOBODY
            return
        self.pump.sleep()
        if words[ATTENTION] != PUMP:
            words[ATTENTION] = PUMP
            self._links.board.fence()
            self._pump()  # what was reported before workers could see the flag
        if self.pump.reads is not None:
            self._minder.hear_reader()

    def _settle(self) -> None:
        """Does what deliveries have left to be done."""
        self.assembly.holdings.reclaim()
        self.epochs.settle()

    def _pump(self) -> None:
        self.pump.receive()
        if self.pump.faults:
            self._minder.tend()
        if self._streams and self.epochs.first is not None:
            self.epochs.first.end = self.pump.run.scheduler.end

    # --- the end -------------------------------------------------------------------------------------------

    def close(self, timeout: float = MP_STATUS_CHECK_INTERVAL) -> None:
        """Ends lanes and thread. Batches that the consumer holds live on. Idempotent; any thread may call it. It does
        nothing in a process that was forked from the engine's.

        ``timeout``: seconds after which workers that are still at a sample are killed; by default PyTorch's.
        """
        if os.getpid() != self._process:
            return  # a fork has dropped its copy of an iterator: workers and channels are its parent's
        if OwnThread.is_current():
            # the garbage collector ran in a thread that this would wait for, perhaps while it holds a lock
            threading.Thread(target=self.close, name="closing").start()
            return
        with self._lock:
            if self.closed:
                return
            self.closed = True
            os.eventfd_write(self._links.wake, 1)
        self._thread.join()
        self._minder.close()
        self.on_close()
        if self._share is not None:
            self._share.close()
        ended = [lane.close(timeout) for lane in self.pump.lanes.values()]
        if self.pump.reads is not None:
            self.pump.reads.reader.give_back()
            self._links.board.read_directly()  # to be reported once the board is closed, too
        try:
            if self.assembly.loading is not None:
                self.assembly.loading.close()
        finally:
            if all(ended):
                self.assembly.clear()
                self._links.close()
