"""How the device lane prepares tasks: issued to its executors by split point, waited for, and reported.

A task is reported once the device is through with it, in the order in which they came: while it waits for that alone,
the next one is issued. Meanwhile the thread asks before each of its steps (a stage, a sample, a part) whether it is
through, and lets no graph be built before it is: a slow step must not keep finished samples from their batches (P5).
There too it lets other threads have the interpreter (see ``slices``).

A sample costs what the device says, by events around its part. A stand-in on the CPU has no such clock: there it costs
what its part took of the cores, but no more than passed meanwhile (DALI's threads work beside each other).

Where memory is short no sample is bad: the pools of PyTorch, CuPy and DALI let go of what they do not use, and the part
is tried again. Only then is it halved until it fits, and smaller micro-batches follow.

A sample that fails on the device is tried once more on the CPU implementation, with the same draws, before its failure
counts. So is each of those that were at work together where an error is none of their own. A lane that makes nothing
for ``_MOST_USELESS`` micro-batches in a row which the CPU can prepare costs three times the work for nothing: that is
told to ``useless``, with the last error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter

from minato_gpu.device.accelerator import is_out_of_memory
from minato_gpu.device.current_step import CurrentStep
from minato_gpu.device.executor import DeviceExecutor
from minato_gpu.device.graph_prebuild import BuildAhead
from minato_gpu.device.output import DeviceOutput, Issued
from minato_gpu.device.run import DeviceRun, Part
from minato_gpu.device.task_reader import TaskReader, ticket_failure, ticket_seed
from minato_gpu.device.values import Result
from minato_gpu.lanes.base import Failure, Item, Report, Task
from minato_gpu.lanes.contract import AtWork
from minato_gpu.lanes.cpu_time import CoreTime
from minato_gpu.lanes.store import Store
from minato_gpu.memory.status_board import Claim
from minato_gpu.pipeline import Pipeline
from minato_gpu.samples import StageError, Value
from minato_gpu.slices import Slices

_MOST_USELESS = 32


class BrokenDown(BaseException):
    """The lane has broken down, for ``why``: a task could not be reported while another was at work, or a graph cannot
    be built. No error of the step that is at work, which must not take it for its own."""

    def __init__(self, why: Exception) -> None:
        super().__init__(why)
        self.why = why


class DeviceWork:
    """For one thread. ``executors`` by split point, which show in ``at`` what they do;
    ``depth``: tasks that may be under way; ``ahead``: builds graphs that wait for a sample; ``no_memory``: told where
    there is no memory for even one sample that the CPU can prepare; ``useless``: told, with the last error, where the
    device fails all that it is given and the CPU can prepare it; ``trim``: frees what pools of the device's memory hold
    and do not use, if it has pools; ``report``: told of every task; ``next_task``: the one that
    will be begun next, if there is one."""

    def __init__(
        self,
        pipeline: Pipeline,
        executors: dict[int, DeviceExecutor],
        at: CurrentStep,
        store: Store,
        outlet: DeviceOutput,
        *,
        depth: int,
        counts_cores: bool,
        ahead: BuildAhead,
        no_memory: Callable[[Exception], None],
        useless: Callable[[str], None],
        trim: Callable[[], None] | None,
        report: Callable[[Report], None],
        next_task: Callable[[], Task | None] = lambda: None,
    ) -> None:
        self._pipeline = pipeline
        self._executors = executors
        self._at = at
        self._store = store
        self._outlet = outlet
        self._depth = depth
        self.closing = False  # set by another thread: no room is to be waited for
        self._ahead = ahead
        self._no_memory = no_memory
        self._useless = useless
        self._trim = trim
        self._report = report
        self._runs: deque[DeviceRun] = deque()  # issued, and not reported
        self._current: DeviceRun | None = None  # the one that is issued or waited for
        self._ending = False  # a step of ``end`` itself ends no other
        self._reported = 0.0  # when the last one was
        self._failing = 0  # micro-batches in a row of which the device made nothing, and the CPU something
        self._why = ""  # the device's last error
        self._looked = 0  # graphs built when their threads were last looked for
        self._cores = CoreTime("DALI") if counts_cores else None
        self._slices = Slices()
        self._reader = TaskReader(store, executors, pipeline.host_prefix, self._slices.between, next_task)
        at.between = self._between
        if depth > 1:
            at.scheduled = self._reader.look_ahead

    def close(self) -> None:
        """All is reported."""
        if self._cores is not None:
            self._cores.close()

    def at_work(self) -> tuple[AtWork, ...]:
        """From another thread: since when this one has been at its current step, and what that is."""
        run, step = self._current, self._at.step
        if run is None:
            return ()
        sample, given = self._at.number(step), run.given
        started = 0 if sample is None or sample >= len(given) else given[sample] + 1
        return (AtWork(0, Claim(run.task.run, run.task.chunk, started, step.stage + 1), step.since, step.samples),)

    @property
    def under_way(self) -> bool:
        """Whether a task is to be ended."""
        return bool(self._runs)

    # --- tasks -----------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Forget what is under way: nobody will end it."""
        self._runs.clear()
        self._current, self._ending = None, False
        self._reader.forget()

    def begin(self, task: Task) -> None:
        """Issue all of a task, and end those before it that have to be for that."""
        run = self._current = DeviceRun(task, self._pipeline.host_prefix)
        self._slices.begin()
        self._at.enter()
        self._look()
        for split, numbers in run.by_split().items():
            self._begin_parts(run, split, numbers)
        self._runs.append(run)
        self._current = None
        while len(self._runs) >= self._depth:
            self.end()

    def end(self) -> None:
        """Wait for the task that has been under way for longest, and report it."""
        self._ending = True
        run, current = self._runs.popleft(), self._current
        if not run.through:
            self._current = run
            self._at.enter(samples=len(run.tickets))
        while run.parts:
            self._settle(run, run.parts.popleft())
        if self._current is not current:
            self._current = current
            self._at.enter()
        begin, end = max(run.begin, self._reported), perf_counter()
        self._reported = end
        self._look(repeated=run.repeated > 0)
        layout, self._outlet.layout = self._outlet.layout, None
        self._report(run.report(begin, end, layout, tells_parts=bool(self._pipeline.cuts)))
        self._ending = False

    def _between(self) -> None:
        self._slices.between()
        self._report_through()

    def _report_through(self) -> None:
        """Report the tasks that the device is through with."""
        while self._runs and not self._ending and self._runs[0].through:
            try:
                self.end()
            except Exception as error:
                raise BrokenDown(error) from error

    # --- parts of tasks --------------------------------------------------------------------------------------

    def _begin_parts(self, run: DeviceRun, split: int, left: list[int], most: int | None = None) -> None:
        """``most``: samples that a micro-batch held before memory was short for these, if it was."""
        executor = self._executors[split]
        while left:
            while self._runs and not executor.built:
                self.end()
            count = min(len(left), executor.batches.size.limit)
            self._await_room(run, executor, count)
            count = count if self._outlet.room is None else self._outlet.room.reserve(run.task, executor.made, count)
            self._begin_part(run, split, left[:count], most)
            left = left[count:]

    def _await_room(self, run: DeviceRun, executor: DeviceExecutor, count: int) -> None:
        """Wait while samples that are made now would go to the host, and from there back to the device for their batch:
        until there is room for them, or the consumer waits."""
        room = self._outlet.room
        if room is None or run.parts:
            return
        while not self.closing and room.lacks(run.task, executor.made, count):
            run.usual = False  # the device waits, too: how long it takes is not seen
            if self._runs:
                self.end()
            else:
                self._current = None
                room.wait()
        if self._current is None:
            self._current = run
            self._at.enter()

    def _begin_part(self, run: DeviceRun, split: int, numbers: list[int], most: int | None) -> None:
        begin, used, unusual, repeated = perf_counter(), self._core_s(), self._unusual(split), run.repeated
        issued: Issued | None = None
        short: str | None = None
        run.given = []
        try:
            issued = self._issue(run, split, numbers)
        except Exception as error:  # not a sample's own, nor kept: its frames hold memory
            self._outlet.let_go()
            self._why = str(error)
            short = self._why if is_out_of_memory(error) else None
        if issued is None:
            if short is not None and self._begin_again(run, split, numbers, most):
                return
            issued = Issued(self._without_device(run, split, numbers))
            if short is not None and not isinstance(issued.items[0], Failure):
                self._no_memory(MemoryError(short))
            elif short is not None and most is not None:  # the sample asks for too much wherever it is
                self._executors[split].batches.size.set(most)
        passed, core_s = perf_counter() - begin, self._core_s() - used
        host_s = min(core_s, passed) if core_s > 0 else passed
        part = Part(split, numbers, issued, host_s, run.given, run.repeated - repeated, short is not None)
        run.usual = run.usual and self._unusual(split) == unusual
        if self._depth == 1 or issued.beyond:
            self._settle(run, part)
        else:
            run.parts.append(part)

    def _unusual(self, split: int) -> tuple[int, int]:
        """What makes a part take longer than others, as often as it has happened."""
        executor = self._executors[split]
        return executor.builds, executor.batches.short

    def _begin_again(self, run: DeviceRun, split: int, numbers: list[int], most: int | None) -> bool:
        """There is no memory for the samples together: pools are trimmed, then there are fewer samples at once. Whether
        either can be."""
        batches, half = self._executors[split].batches, len(numbers) // 2
        batches.short += 1
        if self._trim is not None:
            self._trim()
        run.usual = False
        if most is None and self._trim is not None:
            self._begin_parts(run, split, numbers, batches.size.limit)
            return True
        if half:
            most = batches.size.limit if most is None else most
            batches.size.short(len(numbers))
            for some in (numbers[:half], numbers[half:]):
                self._begin_parts(run, split, some, most)
        return half > 0

    def _without_device(self, run: DeviceRun, split: int, numbers: list[int]) -> list[Item]:
        """The references of samples that the CPU's implementations prepare, because the device has failed them all, or
        has no memory for even one."""
        found = [self._reader.fields(*run.tickets[number], run.task) for number in numbers]
        self._current = run
        run.given = [n for n, one in zip(numbers, found, strict=True) if not isinstance(one, Failure)]
        pairs = zip(numbers, found, strict=True)
        return [one if isinstance(one, Failure) else self._repeat(run, split, n, one[0]) for n, one in pairs]

    def _settle(self, run: DeviceRun, part: Part) -> None:
        """Wait until the device is through with the part."""
        found: list[Item] | None = None
        seconds: float | None = None
        repeated = part.repeated
        try:
            found = self._outlet.settle(part.issued)
            seconds = self._outlet.seconds(part.issued)
        except Exception as error:  # of the device: not a sample's own
            self._why = str(error)
        if found is None:
            found, repeated = self._without_device(run, part.split, part.numbers), len(part.ran)
        run.settle(part, found, seconds)
        self._executors[part.split].sweep()
        if not part.short:  # that is another matter, and may pass
            self._judge(found, made=len(part.ran) - repeated)

    def _judge(self, items: list[Item], made: int) -> None:
        """Whether the device is of any use. ``made``: how many of a micro-batch's ``items`` it has made."""
        if made > 0:
            self._failing = 0
        elif not all(isinstance(item, Failure) for item in items):
            self._failing += 1
            if self._failing == _MOST_USELESS:
                self._useless(self._why)

    def _issue(self, run: DeviceRun, split: int, numbers: list[int]) -> Issued:
        executor = self._executors[split]
        read = self._reader.read(run, split, numbers)
        items, ready, given = read.items, read.ready, read.given
        run.given = [numbers[at] for at in ready]
        try:
            self._ahead.start(given)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise BrokenDown(error) from error
        with self._outlet.working(behind=read.begun and run.usual):
            results = executor.run(given, self._outlet.stream)
            self._at.enter(samples=len(items))
            tickets = [run.tickets[number] for number in run.given]
            put = self._outlet.put_all(run.task, tickets, results, executor.made, self._at.each)
            for at, one, result, item in zip(ready, given, results, put, strict=True):
                items[at] = self._take(run, split, numbers[at], one[0], result) if item is None else item
            self._at.pause()
            return self._outlet.issued(items)

    def _take(self, run: DeviceRun, split: int, number: int, fields: Mapping[str, Value], result: Result) -> Item:
        """The reference of a sample: of what the device has made, or, where that is no use, of what the CPU makes."""
        if isinstance(result, StageError):
            self._why = str(result)
        else:
            try:
                return self._outlet.put(run.task, *run.tickets[number], result, self._executors[split].made)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self._why = str(error)
        return self._repeat(run, split, number, fields)

    def _repeat(self, run: DeviceRun, split: int, number: int, fields: Mapping[str, Value]) -> Item:
        """The reference of a sample that the CPU's implementations prepare in the device's place, or its failure."""
        run.repeated += 1
        sample, (piece, at) = run.given.index(number), run.tickets[number]
        try:
            seed = ticket_seed(run.task, piece, at)
            result = self._pipeline.run(
                fields, seed, start=split, before_stage=lambda stage: self._at.enter(stage, sample)
            )
            return self._outlet.put(run.task, piece, at, result, frozenset())
        except Exception as error:
            return ticket_failure(run.task, piece, at, error, "device, then cpu")

    # --- cores -----------------------------------------------------------------------------------------------

    def _core_s(self) -> float:
        return 0.0 if self._cores is None else self._cores()

    def _look(self, *, repeated: bool = False) -> None:
        """Graphs that have been built, here or ahead, have brought threads of their own."""
        builds = sum(executor.builds for executor in self._executors.values())
        if builds != self._looked or repeated:
            self._looked = builds
            if self._cores is not None:
                self._cores.look()
