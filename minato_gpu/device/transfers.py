"""Copies batches to one device from a thread of its own, so that the training loop never issues copies.

``Transfers`` issues loads in the order of delivery on one stream of the lowest priority. A load is a few asynchronous
copies for one batch; the host does not wait for them. What they read (a slab of the host arena, an executor's
micro-batch) is kept until the load's event has passed, which ``sweep`` asks.

The batch that the device delivers next may always be loaded; others only as far as the budget has room. Until that next
batch is loaded, its bytes are reserved in the budget, so that batches alone never hold more than the budget or one of
them (for samples see ``budget``).

When the device has no memory for that batch: the pools free what they do not use; then the budget is halved, and
samples and later batches leave the device while the load is tried again.
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
from minato_gpu.device.loads import Load, LoadContext
from minato_gpu.device.pinned_memory import PinnedArena
from minato_gpu.samples import JSON, OutputBatch
from minato_gpu.util.messages import LOGGER
from minato_gpu.util.threads import OwnThread

_ATTEMPTS = 2000  # to load the next batch while samples on the device leave no memory for it
_MOMENT_S = 5e-3  # between attempts: executors finish their work, which may take long on a busy machine
_EVERYTHING = 1 << 62


def _wrapped(error: BaseException) -> ExceptionWrapper:
    """Wraps an error of a load without its frames, which hold memory."""
    return ExceptionWrapper((type(error), error, error.__traceback__), "while a batch was loaded onto the device")


class Transfers:
    """Queue, thread and budget for the batches of one device."""

    def __init__(self, accelerator: Accelerator, host: PinnedArena, budget: DeviceBudget) -> None:
        self.accelerator = accelerator
        self.budget = budget
        self._context = LoadContext(accelerator, host)
        self._queue: list[Load] = []  # in the order of delivery
        self._changed = threading.Condition()
        self._next = OutputBatch(0)  # what the consumer takes next, from any device
        self._next_for_this_device = OutputBatch(0)  # what it takes next from this device
        self._loaded: dict[OutputBatch, Load] = {}  # loads whose bytes are counted in the budget, by order
        self.batch_bytes = 0  # bytes of the largest batch known
        self.rows = 0  # rows of the largest stacked batch, set when it is admitted
        self._issued = self._short = self._unloaded = 0
        self.consumer_waits = False  # for a batch that is not ready
        self._freed = threading.Event()  # the consumer has taken a batch, or waits for one
        self.wants_room = False  # the next batch has no memory: the consumer is to call ``room_made``
        self._room_made_for = OutputBatch(-1)  # the consumer's next batch when room was last made
        self._all_reserved = False  # nothing else may take memory
        self._only_next = False  # this device's next batch must fit the budget until it is the consumer's next
        self._closed = False
        self._stream: Stream | None = None  # made by the thread, whose loads report a failure
        self._thread: threading.Thread | None = OwnThread(target=self._main, name="minato-copies", daemon=True)
        self._thread.start()

    # --- for whoever holds the engine's lock -----------------------------------------------------------------------

    def submit(self, load: Load) -> None:
        """Queues a load; never blocks. Once it is ``issued``, the host's ``issued_fd`` becomes readable."""
        with self._changed:
            insort(self._queue, load, key=lambda each: each.order)
            self._learn_batch_bytes(load.nbytes)
            self._changed.notify()

    def expect(self, order: OutputBatch, turn: OutputBatch | None = None) -> None:
        """Sets the batch that the consumer takes next from any device, and the next one from this device (``turn``;
        None: the same)."""
        with self._changed:
            self._next, self._next_for_this_device = order, order if turn is None else turn
            self._update_reserve()
            if self._queue:
                self._changed.notify()

    def leave(self, load: Load) -> None:
        """Removes a load whose batch the consumer takes, or nobody wants any more; frees its bytes in the budget."""
        with self._changed:
            load.cancelled = not load.issued
            self._uncount(load)
            self._changed.notify()
        self._freed.set()

    def waiting(self, *, waits: bool) -> None:
        """Sets whether the consumer is waiting for a batch."""
        self.consumer_waits = waits
        if waits:
            self._freed.set()

    def room_made(self) -> None:
        """Answers ``wants_room``: all samples that are in no batch have left the device."""
        with self._changed:
            self.wants_room = False
            self._room_made_for = self._next
            self._changed.notify()

    # --- any thread --------------------------------------------------------------------------------------------

    def announce(self, nbytes: int) -> None:
        """Raises the expected size of a batch to ``nbytes``."""
        if nbytes > self.batch_bytes:
            with self._changed:
                self._learn_batch_bytes(nbytes)

    def make_way(self, own: int) -> bool:
        """Lowers the budget for an executor that has no memory for a sample and itself holds ``own`` bytes.

        Returns False, with nothing done, when the loader holds no more than one batch on the device beside these.
        """
        with self._changed:
            held = sum(self.budget.held.values()) - own
            if held <= self.batch_bytes:
                return False
            self.budget.lower(max(self.batch_bytes, held // 2))
            return True

    def await_room(self) -> None:
        """Waits until the consumer takes a batch or waits for one, for 5 ms at most; then frees what
        copies have read."""
        if self._freed.wait(_MOMENT_S):
            self._freed.clear()
        self.sweep()

    def evict_samples(self, *also: Load) -> None:
        """Copies samples on a device without memory to the host: those of the queued loads and of ``also``. Waits for
        copies in flight, which may hold samples, too."""
        with self._changed:
            for load in (*also, *self._queue):
                with contextlib.suppress(Exception):  # of the device: the next attempt raises it
                    load.make_room(self._context)
        self._context.held.wait()
        self.sweep()

    def sweep(self) -> None:
        """Frees what finished loads have read; never waits."""
        self._context.held.sweep()

    def stats(self) -> dict[str, JSON]:
        """Returns counters as plain data; sizes in bytes."""
        return {
            "batches": self._issued,
            "copies": self._context.copies,
            "gathered": self._context.gathered,
            "crossed": self._context.crossed,
            "short_of_memory": self._short,
            "unloaded": self._unloaded,
            "pinned_bytes": self._context.host.pinned,
            "pinning_refused": self._context.host.refused,
            "device_bytes": sum(self.budget.held.values()),
            "device_bytes_peak": self.budget.peak,
            "nvml": nvml.reading(self.accelerator.uuid),
        }

    def close(self) -> None:
        """Waits for issued copies and ends the thread. Batches that the consumer holds stay valid. Idempotent."""
        if self._thread is None:
            return
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._thread = None
        self._context.held.close()

    # --- the thread --------------------------------------------------------------------------------------------

    def _main(self) -> None:
        with contextlib.suppress(Exception):  # of the device: the first load raises it
            self.accelerator.enter()
        while (load := self._next_load()) is not None:
            self._context.slices.begin()
            self.sweep()
            if load.cancelled:
                load.forget()
            else:
                try:
                    self._issue(load)
                except BaseException as error:  # raised by a user's logging filter, say
                    load.error = _wrapped(error)
                    self._finish(load)
            del load

    def _next_load(self) -> Load | None:
        with self._changed:
            while not self._closed:
                load = self._take_admissible()
                if load is not None:
                    self._queue.remove(load)
                    return load
                self._changed.wait()
            for load in self._queue:
                load.forget()
            self._queue.clear()
            return None

    def _take_admissible(self) -> Load | None:
        """Returns the first load that may be issued, with its bytes taken from the budget; None where there is no room.
        The next batch of this device is always admitted. A cancelled load is returned for removal."""
        cancelled = next((load for load in self._queue if load.cancelled), None)
        if cancelled is not None or not self._queue:
            return cancelled
        first = self._queue[0]
        if self._is_next(first):
            self.budget.take("batches", first.nbytes)
        elif not self.budget.take_some("batches", first.nbytes, 1):
            return None
        first.counted = True
        self._loaded[first.order] = first
        self._update_reserve()
        return first

    def _is_next(self, load: Load) -> bool:
        """Returns True when the load is the next batch of this device, or one before it."""
        return load.order <= self._next or (load.order == self._next_for_this_device and not self._only_next)

    def _update_reserve(self) -> None:
        """Reserves in the budget what the next batch of this device still needs, assuming the largest batch."""
        loaded = max(
            self._loaded[n].nbytes if n in self._loaded else 0 for n in (self._next, self._next_for_this_device)
        )
        self.budget.reserved = _EVERYTHING if self._all_reserved else max(0, self.batch_bytes - loaded)

    def _issue(self, load: Load) -> None:
        short = self._try_issue(load)
        self._room_made_for = OutputBatch(-1)
        if short and self._is_next(load):  # first free what pools do not use
            with contextlib.suppress(Exception):  # of the device: the attempt raises it
                self.accelerator.trim()
            short = self._try_issue(load)
        if short and self._is_next(load):
            short = self._issue_with_less(load)
        if short and load.order > self._room_made_for:
            self._requeue(load)  # the consumer may free memory before it waits for this one
        else:
            self._finish(load)

    def _finish(self, load: Load) -> None:
        """Ends a load: the consumer gets the batch or, in its place, the error."""
        load.forget()
        with self._changed:
            self._correct_size(load)
            self._issued += 1
            load.issued = True
        os.eventfd_write(self._context.host.issued_fd, 1)

    def _try_issue(self, load: Load) -> bool:
        """Issues a load, or stores why it cannot be issued in its ``error``. Returns True when the device is out of
        memory."""
        load.event = load.error = None
        try:
            if self._stream is None:
                self._stream = self.accelerator.stream()
            with self.accelerator.running(self._stream):
                try:
                    load.issue(self._context)
                finally:  # also after a part of a load: what it reads is in use
                    load.event = self.accelerator.event()
        except BaseException as error:
            load.error = _wrapped(error)
            return is_out_of_memory(error)
        finally:
            self._context.held.hold(load.event, load.keep)
            load.keep = []
        return False

    def _uncount(self, load: Load) -> None:
        """Frees a load's bytes in the budget."""
        if load.counted:
            load.counted = False
            self._loaded.pop(load.order, None)
            self._update_reserve()  # before an executor can take the freed bytes
            self.budget.give("batches", load.nbytes)

    # --- where the device has no memory for a batch ------------------------------------------------------------

    def _requeue(self, load: Load) -> None:
        """Queues a load again that the consumer does not wait for yet; lowers the budget."""
        with self._changed:
            self._uncount(load)
            if not load.cancelled:  # else the thread drops it from the queue
                self._only_next = self._only_next or load.order == self._next_for_this_device
                self._lower_budget(0)
            insort(self._queue, load, key=lambda each: each.order)

    def _issue_with_less(self, load: Load) -> bool:
        """Tries a load again while samples and later batches leave the device. Returns True when it is still out of
        memory."""
        with self._changed:
            self._lower_budget(load.nbytes)
            self._all_reserved = True
            self._update_reserve()
        short = True
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._ask_for_room(load)
            self.evict_samples(load)
            alone = attempt > 0 and not self.budget.held.get(
                "samples"
            )  # read before the attempt: later frees do not count
            short = self._try_issue(load)
            while short and attempt and self._unload_latest(load):
                short = self._try_issue(load)
            if not short or alone or load.cancelled or self._closed:
                break
        with self._changed:
            self._all_reserved = False
            self._update_reserve()
        return short

    def _unload_latest(self, load: Load) -> bool:
        """Copies the latest loaded batch behind this one back to the host and queues it again. Returns False where
        there is none, or the device fails.

        None of these is handed over before ``load``, unless the consumer has stopped waiting for it.
        """
        with self._changed:
            later = [each for each in self._loaded.values() if each.order > load.order and each.error is None]
            if not later or load.order < self._next:
                return False
        last = max(later, key=lambda each: each.order)
        try:
            last.unload(self._context)
        except Exception:  # of the device, or the host is full: it stays
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
        """Sets ``wants_room`` and waits until the waiting consumer has brought samples to the host; executors finish
        meanwhile."""
        with self._changed:
            self.wants_room = True
            os.eventfd_write(self._context.host.issued_fd, 1)
            self._changed.wait_for(lambda: self._closed or load.cancelled or not self.wants_room)
            self.wants_room = False
            self._changed.wait(_MOMENT_S)

    def _lower_budget(self, nbytes: int) -> None:
        """Lowers the budget to half of what is held beside the failing load's ``nbytes``, but not below one batch."""
        held = sum(self.budget.held.values()) - nbytes
        limit, self._short = max(self.batch_bytes, held // 2), self._short + 1
        self.budget.lower(limit)
        if self._short == 1:
            text = "%s has no memory for a batch: from now on at most %d bytes are held there, the rest on the host"
            LOGGER.warning(text, self.accelerator.device, limit)

    def _correct_size(self, load: Load) -> None:
        """Corrects the budget once the size of a batch on the device is known."""
        if load.measured is None or not load.counted:
            return
        self.budget.take("batches", load.measured)
        self.budget.give("batches", load.nbytes)
        load.nbytes = load.measured
        self._learn_batch_bytes(load.nbytes)

    def _learn_batch_bytes(self, nbytes: int) -> None:
        """Records that there are batches of ``nbytes``."""
        if nbytes > self.batch_bytes:
            self.batch_bytes = nbytes
            self.budget.follow(nbytes)
        self._update_reserve()
