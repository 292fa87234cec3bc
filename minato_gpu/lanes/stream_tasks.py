"""What a worker does with a task of an iterable data set: the next batch of its own stream (streams.py)."""

from __future__ import annotations

from time import perf_counter

from minato_gpu.lanes.base import Item, Task
from minato_gpu.lanes.placement import Placement
from minato_gpu.lanes.produce import Job, Producer
from minato_gpu.lanes.progress import Progress
from minato_gpu.lanes.store import Store
from minato_gpu.lanes.streams import Stream, share_seed
from minato_gpu.memory.status_board import LIMIT, SAVES, SINCE_NS, WorkerStatusBoard
from minato_gpu.samples import no_end


class StreamTasks:
    """The stream of worker ``number``, opened anew with each run and epoch."""

    def __init__(
        self, number: int, job: Job, store: Store, producer: Producer, placement: Placement, board: WorkerStatusBoard
    ) -> None:
        self._job, self._store, self._producer, self._placement = job, store, producer, placement
        self._words, self._row = board.words, board.row(number)
        self._stream: Stream | None = None
        self._of: tuple[int, int] | None = None

    def next(self, task: Task, progress: Progress) -> str:
        """The next batch, as PyTorch's worker would fetch it; returns "exhausted" where there is none."""
        status, failed = "", False
        item: Item = None
        try:
            no_end(self._producer.check_started, "worker_init_fn")()
            if self._of != (task.run, task.epoch):
                self._open(task)
            if self._stream is None:
                raise StopIteration
            item = self._store.put(self._stream.fetch(task.samples), collated=True)
        except StopIteration:
            if self._stream is not None:
                progress.told_of_stream = self._stream.told()
            status, self._stream = "exhausted", None
        except Exception as error:
            failed = True  # nobody knows how far into the batch
            item = self._placement.batch_failure(error, "iterating the data set", task.epoch)
        if self._stream is not None:  # also after a batch that failed: its samples are gone from the stream
            progress.told_of_stream = self._stream.told(exactly=bool(self._words[SAVES]) or failed)
        progress.add(item)
        return status

    def _open(self, task: Task) -> None:
        self._of, self._stream = (task.run, task.epoch), None
        if task.shared_seed is not None:
            share_seed(self._job.dataset, task.shared_seed)
        opened = no_end(Stream, "iter() of the data set")
        self._stream = opened(self._job, task.start, task.samples, self._goes_on)

    def _goes_on(self) -> bool:
        """One more sample of a stream that is read again: whether the parent still wants it."""
        self._words[self._row + SINCE_NS] = int(1e9 * perf_counter())
        return bool(self._words[self._row + LIMIT] > 0)
