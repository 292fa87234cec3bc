"""Batches on their way to a device: a thread that issues copies, so that the training loop never does.

Loads are issued in the order of delivery, on one stream of the lowest priority, by a thread for each device. It issues
a few asynchronous copies for a batch and goes on; nobody waits on the host for them. What they read, a slab of the host
arena or an executor's micro-batch, is kept until the load's event has come to pass, which is asked for when memory is
reclaimed.

The batch that a device delivers next may always be loaded, others as far as the budget has room. So that the first of
these never exceeds it, its bytes are set aside until it is among those loaded.
"""

from __future__ import annotations

import contextlib
import os
import threading
from bisect import insort

from torch._utils import ExceptionWrapper

from minato_gpu.device import nvml
from minato_gpu.device.accelerator import Accelerator, Stream, is_out_of_memory
from minato_gpu.device.budget import DeviceBudget
from minato_gpu.device.loads import Load, Port
from minato_gpu.device.pinned_memory import Host
from minato_gpu.notices import LOGGER
from minato_gpu.samples import JSON, OutputBatch
from minato_gpu.threads import OwnThread

_ATTEMPTS = 2000  # to load a batch that is due, while samples are on the device for which there is no memory
_MOMENT_S = 5e-3  # between them: executors end what they are at, which may take long on a busy machine
_ALL = 1 << 62


def _text(error: BaseException) -> ExceptionWrapper:
    """Why a load was not issued, without the exception, whose frames hold what it has taken."""
    return ExceptionWrapper((type(error), error, error.__traceback__), "while a batch was loaded onto the device")


class Transfers:
    """The way from ``host`` to one device."""

    def __init__(self, accelerator: Accelerator, host: Host, budget: DeviceBudget) -> None:
        self.accelerator = accelerator
        self.budget = budget
        self._port = Port(accelerator, host)
        self._queue: list[Load] = []  # in the order of delivery
        self._changed = threading.Condition()
        self._due = OutputBatch(0)  # the batch that the consumer takes next, from whichever device
        self._turn = OutputBatch(0)  # the first from then on that may be this device's
        self._loaded: dict[OutputBatch, Load] = {}  # those whose bytes are in the account, by their order
        self.batch_bytes = 0  # of the largest batch that is known of
        self.rows = 0  # of the largest one of rows, whatever part of it is still to be prepared
        self._issued = self._short = self._unloaded = 0
        self.consumer_waits = False  # for a batch that is not there yet
        self._freed = threading.Event()  # the consumer has taken a batch, or waits for one
        self.wants_room = False  # the due batch cannot be loaded before ``room_made``
        self._made_for = OutputBatch(-1)  # which batch the consumer waited for when room was last made
        self._squeezed = False  # nor is anything else to take memory
        self._only_due = False  # what the consumer takes from another device first is not to be waited for here
        self._closed = False
        self._stream: Stream | None = None  # made by the thread, by which the consumer is told if that fails
        self._thread: threading.Thread | None = OwnThread(target=self._main, name="minato-copies", daemon=True)
        self._thread.start()

    # --- whoever holds the engine's lock -----------------------------------------------------------------------

    def submit(self, load: Load) -> None:
        """Ask for a load; never blocks. It becomes ``issued``, and then the host's ``told`` readable."""
        with self._changed:
            insort(self._queue, load, key=lambda each: each.order)
            self._learn(load.nbytes)
            self._changed.notify()

    def expect(self, order: OutputBatch, turn: OutputBatch | None = None) -> None:
        """The consumer takes batch ``order`` next, from whichever device, and ``turn`` (None: that one) from this."""
        with self._changed:
            self._due, self._turn = order, order if turn is None else turn
            self._set_aside()
            if self._queue:
                self._changed.notify()

    def leave(self, load: Load) -> None:
        """The consumer takes the load's batch, or nobody wants it any more."""
        with self._changed:
            load.cancelled = not load.issued
            self._uncount(load)
            self._changed.notify()
        self._freed.set()

    def waiting(self, *, waits: bool) -> None:
        """Whether the consumer waits for a batch, as from now."""
        self.consumer_waits = waits
        if waits:
            self._freed.set()

    def room_made(self) -> None:
        """No sample that is in no batch is on the device any more."""
        with self._changed:
            self.wants_room = False
            self._made_for = self._due
            self._changed.notify()

    # --- any thread --------------------------------------------------------------------------------------------

    def announce(self, nbytes: int) -> None:
        """Batches will be as large as this."""
        if nbytes > self.batch_bytes:
            with self._changed:
                self._learn(nbytes)

    def make_way(self, own: int) -> bool:
        """An executor that holds ``own`` bytes has no memory for a sample: whether there is more than a batch of the
        loader's on the device besides, of which less is to be held from now on."""
        with self._changed:
            held = sum(self.budget.held.values()) - own
            if held <= self.batch_bytes:
                return False
            self.budget.lower(max(self.batch_bytes, held // 2))
            return True

    def await_room(self) -> None:
        """Wait until the consumer has taken a batch or waits for one, a moment at most: what copies have read since is
        free then."""
        if self._freed.wait(_MOMENT_S):
            self._freed.clear()
        self.sweep()

    def let_go(self, *also: Load) -> None:
        """A device has no memory: what was made there for batches that are to be loaded here, and for ``also``, comes
        by way of the host. Waits for what is under way, which may hold samples too."""
        with self._changed:
            for load in (*also, *self._queue):
                with contextlib.suppress(Exception):  # of the device: its next attempt will say so
                    load.make_room(self._port)
        self._port.wait()
        self.sweep()

    def sweep(self) -> None:
        """Let go of what loads that are through have read; never waits."""
        self._port.sweep()

    def stats(self) -> dict[str, JSON]:
        """Counters as plain data; sizes in bytes."""
        return {
            "batches": self._issued,
            "copies": self._port.copies,
            "gathered": self._port.gathered,
            "crossed": self._port.crossed,
            "short_of_memory": self._short,
            "unloaded": self._unloaded,
            "pinned_bytes": self._port.host.pinned,
            "pinning_refused": self._port.host.refused,
            "device_bytes": sum(self.budget.held.values()),
            "device_bytes_peak": self.budget.peak,
            "nvml": nvml.reading(self.accelerator.uuid),
        }

    def close(self) -> None:
        """Wait for what has been issued. Batches that the consumer holds live on. Idempotent."""
        if self._thread is None:
            return
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._thread = None
        self._port.close()

    # --- the thread --------------------------------------------------------------------------------------------

    def _main(self) -> None:
        with contextlib.suppress(Exception):  # of the device: its first load will say so
            self.accelerator.enter()
        while (load := self._next()) is not None:
            self._port.slices.begin()
            self.sweep()
            if load.cancelled:
                load.forget()
            else:
                try:
                    self._issue(load)
                except BaseException as error:  # a filter of the user's for our log, say
                    load.error = _text(error)
                    self._end(load)
            del load

    def _next(self) -> Load | None:
        with self._changed:
            while not self._closed:
                load = self._that_may_go_on()
                if load is not None:
                    self._queue.remove(load)
                    return load
                self._changed.wait()
            for load in self._queue:
                load.forget()
            self._queue.clear()
            return None

    def _that_may_go_on(self) -> Load | None:
        """A load, with its bytes taken: this device's next batch always, another as far as the budget allows."""
        cancelled = next((load for load in self._queue if load.cancelled), None)
        if cancelled is not None or not self._queue:
            return cancelled
        first = self._queue[0]
        if self._is_due(first):
            self.budget.take("batches", first.nbytes)
        elif not self.budget.take_some("batches", first.nbytes, 1):
            return None
        first.counted = True
        self._loaded[first.order] = first
        self._set_aside()
        return first

    def _is_due(self, load: Load) -> bool:
        """Whether it is this device's next batch, or one before that."""
        return load.order <= self._due or (load.order == self._turn and not self._only_due)

    def _set_aside(self) -> None:
        """What this device's next batch will need. While a small one is loaded, that after it may need more."""
        loaded = max(self._loaded[n].nbytes if n in self._loaded else 0 for n in (self._due, self._turn))
        self.budget.aside = _ALL if self._squeezed else max(0, self.batch_bytes - loaded)

    def _issue(self, load: Load) -> None:
        short = self._try(load)
        self._made_for = OutputBatch(-1)
        if short and self._is_due(load):  # before anybody has to hold less, pools let go of what they do not use
            with contextlib.suppress(Exception):  # of the device: the attempt will say so
                self.accelerator.trim()
            short = self._try(load)
        if short and self._is_due(load):
            short = self._squeeze(load)
        if short and load.order > self._made_for:
            self._later(load)  # the consumer may still have had what it lets go of before it waits for this one
        else:
            self._end(load)

    def _end(self, load: Load) -> None:
        """There will be no other attempt: the consumer gets the batch or, in its place, the error."""
        load.forget()
        with self._changed:
            self._correct(load)
            self._issued += 1
            load.issued = True
        os.eventfd_write(self._port.host.told, 1)

    def _try(self, load: Load) -> bool:
        """Issue a load, or let its ``error`` say why that cannot be. Returns whether the device is short of memory."""
        load.event = load.error = None
        try:
            if self._stream is None:
                self._stream = self.accelerator.stream()
            with self.accelerator.running(self._stream):
                try:
                    load.issue(self._port)
                finally:  # also of half a load: what it reads is not free before
                    load.event = self.accelerator.event()
        except BaseException as error:
            load.error = _text(error)
            return is_out_of_memory(error)
        finally:
            self._port.attempted(load)
        return False

    def _uncount(self, load: Load) -> None:
        """Its bytes are in the account no more."""
        if load.counted:
            load.counted = False
            self._loaded.pop(load.order, None)
            self._set_aside()  # before an executor can take what is free now
            self.budget.give("batches", load.nbytes)

    # --- where the device has no memory for a batch ------------------------------------------------------------

    def _later(self, load: Load) -> None:
        """The consumer does not wait for this one: it is loaded when batches before it have been taken."""
        with self._changed:
            self._uncount(load)
            if not load.cancelled:  # else the thread drops it from the queue
                self._only_due = self._only_due or load.order == self._turn
                self._lower(0)
            insort(self._queue, load, key=lambda each: each.order)

    def _squeeze(self, load: Load) -> bool:
        """Try again while others let go of what they hold; what executors make meanwhile goes to the host."""
        with self._changed:
            self._lower(load.nbytes)
            self._squeezed = True
            self._set_aside()
        short = True
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._ask_for_room(load)
            self.let_go(load)
            alone = attempt > 0 and not self.budget.held.get("samples")  # asked first: those that go later go too late
            short = self._try(load)
            while short and attempt and self._unload_last(load):
                short = self._try(load)
            if not short or alone or load.cancelled or self._closed:
                break
        with self._changed:
            self._squeezed = False
            self._set_aside()
        return short

    def _unload_last(self, load: Load) -> bool:
        """Put back the last batch behind this one that is loaded. None of them is handed over before it, unless the
        consumer has broken off waiting for it."""
        with self._changed:
            later = [each for each in self._loaded.values() if each.order > load.order and each.error is None]
            if not later or load.order < self._due:
                return False
        last = max(later, key=lambda each: each.order)
        try:
            last.unload(self._port)
        except Exception:  # of the device, or there is no room on the host: it stays
            return False
        with self._changed:
            if last.counted:
                self._uncount(last)
                last.issued = False
                insort(self._queue, last, key=lambda each: each.order)
                self._unloaded += 1
            else:
                last.forget()
        return True

    def _ask_for_room(self, load: Load) -> None:
        """Let a consumer that waits bring what is in no batch yet to the host, and executors end what they are at."""
        with self._changed:
            self.wants_room = True
            os.eventfd_write(self._port.host.told, 1)
            self._changed.wait_for(lambda: self._closed or load.cancelled or not self.wants_room)
            self.wants_room = False
            self._changed.wait(_MOMENT_S)

    def _lower(self, nbytes: int) -> None:
        """Executors and later batches are to hold half as much from now on; ``nbytes``: what is held in vain."""
        held = sum(self.budget.held.values()) - nbytes
        limit, self._short = max(self.batch_bytes, held // 2), self._short + 1
        self.budget.lower(limit)
        if self._short == 1:
            text = "%s has no memory for a batch: from now on at most %d bytes are held there, the rest on the host"
            LOGGER.warning(text, self.accelerator.device, limit)

    def _correct(self, load: Load) -> None:
        """What a batch takes on the device is known now: the account is to say that."""
        if load.measured is None or not load.counted:
            return
        self.budget.take("batches", load.measured)
        self.budget.give("batches", load.nbytes)
        load.nbytes = load.measured
        self._learn(load.nbytes)

    def _learn(self, nbytes: int) -> None:
        """There are batches as large as this."""
        if nbytes > self.batch_bytes:
            self.batch_bytes = nbytes
            self.budget.follow(nbytes)
        self._set_aside()
