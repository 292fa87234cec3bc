"""Runs tasks on the device lane's thread: issues them to executors by split point, waits for the device, reports.

``DeviceWork`` issues a task and, while the device works on it, issues the next (``IN_FLIGHT`` tasks at once). Tasks are
reported in the order in which they came. Before each step (a stage, a sample, a part) the thread asks whether the
oldest task has finished, and reports it at once: a slow step must not keep finished samples from their batches (P5). No
graph is built before such a task is reported. The same pauses let other threads have the interpreter (see ``slices``).

The cost of a sample is measured by CUDA events around its part. The stand-in device on the CPU has no such clock: there
the cost is the CPU time of the part, but no more than the wall time (DALI's threads run side by side).

Errors:
- Out of memory is no sample's error. The pools of PyTorch, CuPy and DALI free what they do not use, and the part is
  tried again; after that it is halved until it fits, and later micro-batches stay smaller.
- A sample that fails on the device is prepared once more by the CPU implementation, with the same random draws, before
  its failure counts. So is every sample of a part that failed as a whole.
- After ``_USELESS_LIMIT`` micro-batches in a row of which the device prepared nothing and the CPU something, the lane
  is given up: it costs about three times the work. So it is when the device has no memory for one sample although the
  loader holds no more than a batch there.

DALI holds the interpreter lock while it builds a graph, which stops the training loop. So graphs are built before the
first sample; one whose fragments need the names of all drawn parameters, by the draws of the first sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter

from minato_gpu.device.accelerator import is_out_of_memory
from minato_gpu.device.current_step import CurrentStep
from minato_gpu.device.dali_graph import NamesUnknown
from minato_gpu.device.executor import DeviceExecutor
from minato_gpu.device.output import DeviceOutput, Issued
from minato_gpu.device.slices import Slices
from minato_gpu.device.tasks import DeviceRun, Part, TaskReader, ticket_failure, ticket_seed
from minato_gpu.device.transfers import Transfers
from minato_gpu.device.values import ExecutorInput, Result
from minato_gpu.lanes.base import Failure, Item, Report, Task
from minato_gpu.lanes.contract import AtWork
from minato_gpu.lanes.cpu_time import CoreTime
from minato_gpu.lanes.store import Store
from minato_gpu.memory.status_board import Claim
from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.samples import StageError, Value
from minato_gpu.util.messages import LOGGER

IN_FLIGHT = 2  # tasks of a device: one at work and one issued behind it
_USELESS_LIMIT = 32


class BrokenDown(BaseException):
    """Raised when the lane can do nothing more: a task could not be reported from within another's step, or a graph
    cannot be built. ``why`` is the cause. A BaseException, so that the step it passes through does not take it for
    its own error."""

    def __init__(self, why: Exception) -> None:
        super().__init__(why)
        self.why = why


class DeviceWork:
    """Issues, awaits and reports the device lane's tasks. For one thread, except ``at_work`` and ``closing``.

    Args:
        executors: by split point; they note their current step in ``at``.
        transfers: copies to the device on which batches live; None where they live on the host.
        device: of the executors. On "cpu" (the stand-in) a sample costs CPU time instead of device time.
        give_up: called when the device prepares nothing that the CPU can prepare, with what it does (a predicate of
            "the lane") and its last error.
        report: called with the report of every task.
        next_task: returns the task that will be begun next, if there is one.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        executors: dict[int, DeviceExecutor],
        at: CurrentStep,
        store: Store,
        transfers: Transfers | None,
        device: str,
        give_up: Callable[[str, str], None],
        report: Callable[[Report], None],
        next_task: Callable[[], Task | None],
    ) -> None:
        self._pipeline = pipeline
        self._executors = executors
        self._at = at
        self._transfers = transfers
        self.outlet = DeviceOutput(store, transfers)
        self._depth = 1 if transfers is None else IN_FLIGHT
        self.closing = False  # set by another thread: stop waiting for room on the device
        self._unbuilt: list[int] = []  # split points whose graphs wait for a first sample
        self._give_up = give_up
        self._report = report
        self._runs: deque[DeviceRun] = deque()  # issued and not reported, oldest first
        self._current: DeviceRun | None = None  # being issued or waited for
        self._ending = False  # inside ``end``: its steps must not end another task
        self._reported = 0.0  # time of the last report
        self._failed_in_row = 0  # micro-batches in a row of which the device made nothing and the CPU something
        self._last_error = ""  # the device's last error
        self._builds_seen = 0  # graphs built when their threads were last looked for
        self._cores = CoreTime("DALI") if device == "cpu" else None
        self._slices = Slices()
        self._reader = TaskReader(store, executors, pipeline.host_prefix, self._slices.between, next_task)
        at.between = self._between
        if self._depth > 1:
            at.scheduled = self._reader.look_ahead

    def open(self, splits: Iterable[int]) -> None:
        """Imports what the stages need, and builds the graphs of these split points as far as they need no sample.
        Raises ImportError, or a fragment's error that a sample would not change."""
        for executor in self._executors.values():
            executor.load()
        for split in splits:
            try:
                self._executors[split].build({})
            except Exception as error:
                if not (isinstance(error, NamesUnknown) or is_out_of_memory(error)):
                    raise
                LOGGER.debug("the device's graph from stage %d on waits for a sample (%r)", split, error)
                self._unbuilt.append(split)

    def _build_rest(self, samples: Sequence[ExecutorInput]) -> None:
        """Builds the remaining graphs from the draws of the first sample whose draws raise nothing. Raises a fragment's
        error."""
        for sample in samples if self._unbuilt else ():
            try:
                draws = {split: self._executors[split].draws(sample) for split in self._unbuilt}
            except Exception:  # noqa: S112 - the sample fails by itself when it is prepared
                continue
            for split, params in draws.items():
                self._executors[split].build(params)
            self._unbuilt.clear()
            return

    def close(self) -> None:
        """Releases the measurement of CPU time; all tasks must have been reported."""
        if self._cores is not None:
            self._cores.close()

    def at_work(self) -> tuple[AtWork, ...]:
        """Returns the current step and when it began, as one entry; empty when idle. May be called by any thread."""
        run, step = self._current, self._at.step
        if run is None:
            return ()
        sample, given = self._at.number(step), run.submitted
        started = 0 if sample is None or sample >= len(given) else given[sample] + 1
        return (AtWork(0, Claim(run.task.run, run.task.chunk, started, step.stage + 1), step.since, step.samples),)

    @property
    def under_way(self) -> bool:
        """True while tasks are issued and not reported."""
        return bool(self._runs)

    # --- tasks -----------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Forgets all tasks in flight; nobody will end them."""
        self._runs.clear()
        self._current, self._ending = None, False
        self._reader.forget()

    def begin(self, task: Task) -> None:
        """Issues all parts of a task, then ends the oldest in flight until another may be issued: without
        ``transfers`` this one, too."""
        run = self._current = DeviceRun(task, self._pipeline.host_prefix)
        self._slices.begin()
        self._at.enter()
        self._find_threads()
        for split, numbers in run.by_split().items():
            self._begin_parts(run, split, numbers)
        self._runs.append(run)
        self._current = None
        while len(self._runs) >= self._depth:
            self.end()

    def end(self) -> None:
        """Waits for the oldest task in flight, and reports it."""
        self._ending = True
        run, current = self._runs.popleft(), self._current
        if not run.finished:
            self._current = run
            self._at.enter(samples=len(run.tickets))
        while run.parts:
            self._settle(run, run.parts.popleft())
        if self._current is not current:
            self._current = current
            self._at.enter()
        begin, end = max(run.begin, self._reported), perf_counter()
        self._reported = end
        self._find_threads(repeated=run.repeated > 0)
        layout, self.outlet.layout = self.outlet.layout, None
        self._report(run.report(begin, end, layout, tells_parts=bool(self._pipeline.cuts)))
        self._ending = False

    def _between(self) -> None:
        """Lets other threads run, and reports the tasks that the device has finished. Raises BrokenDown when that
        fails."""
        self._slices.between()
        while self._runs and not self._ending and self._runs[0].finished:
            try:
                self.end()
            except Exception as error:
                raise BrokenDown(error) from error

    # --- parts of tasks --------------------------------------------------------------------------------------

    def _begin_parts(self, run: DeviceRun, split: int, left: list[int], most: int | None = None) -> None:
        """Issues the samples ``left`` in parts of at most a micro-batch.

        ``most``: the micro-batch size before memory ran short for these samples; None if it did not.
        """
        executor = self._executors[split]
        while left:
            while self._runs and not executor.built:
                self.end()
            count = min(len(left), executor.size.limit)
            self._await_room(run, executor, count)
            count = count if self.outlet.room is None else self.outlet.room.reserve(run.task, executor.made, count)
            self._begin_part(run, split, left[:count], most)
            left = left[count:]

    def _await_room(self, run: DeviceRun, executor: DeviceExecutor, count: int) -> None:
        """Waits until the device has room for ``count`` samples, or the consumer waits for a batch: without room they
        would be copied to the host and back for their batch."""
        room = self.outlet.room
        if room is None or run.parts:
            return
        while not self.closing and room.should_wait(run.task, executor.made, count):
            run.typical = False  # the device idles meanwhile, so its time tells nothing
            if self._runs:
                self.end()
            else:
                self._current = None
                room.transfers.await_room()
        if self._current is None:
            self._current = run
            self._at.enter()

    def _begin_part(self, run: DeviceRun, split: int, numbers: list[int], most: int | None) -> None:
        begin, used, disturbances, repeated = perf_counter(), self._core_s(), self._disturbances(split), run.repeated
        issued: Issued | None = None
        short: str | None = None
        run.submitted = []
        try:
            issued = self._issue(run, split, numbers)
        except Exception as error:  # of the whole part; dropped, because its frames hold memory
            self.outlet.release()
            self._last_error = str(error)
            short = self._last_error if is_out_of_memory(error) else None
        if issued is None:
            if short is not None and self._retry_with_less(run, split, numbers, most):
                return
            issued = Issued(self._prepare_on_cpu(run, split, numbers))
            if short is not None and not isinstance(issued.items[0], Failure):
                self._lack_memory(short)
            elif short is not None and most is not None:  # this sample needs too much on the CPU, too
                self._executors[split].size.set(most)
        passed, core_s = perf_counter() - begin, self._core_s() - used
        host_s = min(core_s, passed) if core_s > 0 else passed
        part = Part(split, numbers, issued, host_s, run.submitted, run.repeated - repeated, short is not None)
        run.typical = run.typical and self._disturbances(split) == disturbances
        if self._depth == 1 or issued.over_budget:
            self._settle(run, part)
        else:
            run.parts.append(part)

    def _disturbances(self, split: int) -> tuple[int, int]:
        """Returns counters that advance when a part takes longer than usual: graphs built, and shortages of memory."""
        executor = self._executors[split]
        return executor.builds, executor.short

    def _retry_with_less(self, run: DeviceRun, split: int, numbers: list[int], most: int | None) -> bool:
        """Issues samples again that did not fit into memory together: first after trimming the pools, then in halves.
        Returns False when neither is possible."""
        executor, half = self._executors[split], len(numbers) // 2
        executor.short += 1
        run.typical = False
        if most is None and self._transfers is not None:
            self._transfers.accelerator.trim()
            self._begin_parts(run, split, numbers, executor.size.limit)
            return True
        if half:
            most = executor.size.limit if most is None else most
            executor.size.short(len(numbers))
            for some in (numbers[:half], numbers[half:]):
                self._begin_parts(run, split, some, most)
        return half > 0

    def _lack_memory(self, error: str) -> None:
        """Called when the device has no memory for one sample: lowers the budget if batches or other samples fill the
        device, else gives the lane up."""
        room = self.outlet.room
        if room is None or not room.transfers.make_way(room.held):
            self._give_up("has no memory left to prepare samples", error)
            return
        for executor in self._executors.values():
            executor.size.set(executor.size.most)

    def _prepare_on_cpu(self, run: DeviceRun, split: int, numbers: list[int]) -> list[Item]:
        """Prepares samples by their CPU implementations, because the device failed them all or has no memory for even
        one. Returns their references."""
        read = self._reader.read_now(run, numbers)
        self._current, run.submitted = run, [*read.given]
        return [
            one if isinstance(one, Failure) else self._prepare_one_on_cpu(run, split, number, one[0])
            for number, one in read.found.items()
        ]

    def _settle(self, run: DeviceRun, part: Part) -> None:
        """Waits until the device has finished a part, and stores its references in the run."""
        found: list[Item] | None = None
        seconds: float | None = None
        repeated = part.repeated
        try:
            found, seconds = self.outlet.settle(part.issued)
        except Exception as error:  # of the device, not of one sample
            self._last_error = str(error)
        if found is None:
            found, repeated = self._prepare_on_cpu(run, part.split, part.numbers), len(part.ran)
        run.settle(part, found, seconds)
        self._executors[part.split].sweep()
        if not part.out_of_memory:  # a shortage of memory may pass
            self._count_failures(found, made=len(part.ran) - repeated)

    def _count_failures(self, items: list[Item], made: int) -> None:
        """Counts micro-batches of which the device prepared nothing and the CPU something; gives the lane up at the
        limit.

        ``made``: how many of the ``items`` the device has prepared.
        """
        if made > 0:
            self._failed_in_row = 0
        elif not all(isinstance(item, Failure) for item in items):
            self._failed_in_row += 1
            if self._failed_in_row == _USELESS_LIMIT:
                self._give_up("fails every sample that it is given, and the CPU prepares them", self._last_error)

    def _issue(self, run: DeviceRun, split: int, numbers: list[int]) -> Issued:
        """Reads samples, runs them on the device and stores the results; returns without waiting for the device. Raises
        an out-of-memory error, an error of the whole part, or BrokenDown when a graph cannot be built."""
        executor = self._executors[split]
        read = self._reader.read(run, split, numbers)
        given = read.given
        run.submitted = [*given]
        try:
            self._build_rest([*given.values()])
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise BrokenDown(error) from error
        with self.outlet.working(behind=read.scheduled and run.typical):
            results = executor.run([*given.values()], self.outlet.stream)
            self._at.enter(samples=len(numbers))
            tickets = [run.tickets[number] for number in given]
            put = self.outlet.put_all(run.task, tickets, results, executor.made, self._at.each)
            made = {
                number: self._take(run, split, number, fields, result) if item is None else item
                for (number, (fields, _)), result, item in zip(given.items(), results, put, strict=True)
            }
            self._at.pause()
            return self.outlet.issued(
                [one if isinstance(one, Failure) else made[number] for number, one in read.found.items()]
            )

    def _take(self, run: DeviceRun, split: int, number: int, fields: Mapping[str, Value], result: Result) -> Item:
        """Stores what the device made of a sample; prepares the sample on the CPU where the device failed. Returns its
        reference."""
        if isinstance(result, StageError):
            self._last_error = str(result)
        else:
            try:
                return self.outlet.put(run.task, *run.tickets[number], result, self._executors[split].made)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self._last_error = str(error)
        return self._prepare_one_on_cpu(run, split, number, fields)

    def _prepare_one_on_cpu(self, run: DeviceRun, split: int, number: int, fields: Mapping[str, Value]) -> Item:
        """Prepares a sample by its CPU implementations from stage ``split`` on; returns its reference or its
        failure."""
        run.repeated += 1
        sample, (piece, at) = run.submitted.index(number), run.tickets[number]
        try:
            seed = ticket_seed(run.task, piece, at)
            result = self._pipeline.run(
                fields, seed, start=split, before_stage=lambda stage: self._at.enter(stage, sample)
            )
            return self.outlet.put(run.task, piece, at, result, frozenset())
        except Exception as error:
            return ticket_failure(run.task, piece, at, error, "device, then cpu")

    # --- cores -----------------------------------------------------------------------------------------------

    def _core_s(self) -> float:
        return 0.0 if self._cores is None else self._cores()

    def _find_threads(self, *, repeated: bool = False) -> None:
        """Finds the threads of newly built graphs, whose CPU time is to be counted. ``repeated``: samples ran on the
        CPU, too."""
        builds = sum(executor.builds for executor in self._executors.values())
        if builds != self._builds_seen or repeated:
            self._builds_seen = builds
            if self._cores is not None:
                self._cores.look()
