"""Chaos: the real loader, and from a seed everything that a cluster may do to it; nothing may be lost.

Injected are workers that die (kill -9 from within and from outside, a segmentation fault, an exit, a write to shared
memory that has no memory left behind it), workers that hang, samples that raise, samples that cost far more than
others, stages that write something else than they declared, and runs that are given up at some batch, saved, and taken
up by another loader with other workers. Loaders have workers of both kinds, all orders of delivery, samples of equal
and of unequal shapes, pipelines, samplers of every kind (with a state of their own, too, and torchdata's), iterable
data sets, several epochs, workers that persist, and memory budgets down to less than one sample.

After each run the promises are checked:

    P1  every ticket of the sampler was delivered once, or was counted as a failure
    P2  its content is that of a run in which nothing happens (of a stream: its keys)
    P3  none came later than allowed; in strict order the sequence is that of the run in which nothing happens
    P4  bytes in flight stayed within the budget and a sample for each slot; one batch and its copy may always proceed
    P5  every stall has a named cause; no sample was begun again but for a death, and those are counted
    P6  each failure tells epoch, position, index and lane, and exactly those samples failed that cannot be prepared
    P7  no process, thread or shared memory is left

The one thing that is not determined: a sample that kills its worker once, and is by chance under way in another worker
that is killed from outside, has seen two deaths and counts as a bad one.
"""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks import report
from benchmarks.chaos_plan import MOST_BYTES, Plan
from benchmarks.chaos_record import document, quietly, record, summary
from minato_gpu.commands import writable
from minato_gpu.report import write

_CAUSES = {"collate", "lateness", "memory", "sampler", "slow sample", "preparation"}
_COLUMNS = ("fault", "injected", "counted", "lost")
_GONE_S = 10.0

Sample = tuple[float, ...]


@dataclass
class Result:
    """What was injected in one run, what came of it, and which promises were broken (in words; none should be)."""

    injected: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    received: list[Sample] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    lateness: float = 0.0
    peak_bytes: int = 0
    stalls: set[str] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)

    def check(self, promise: str, holds: bool, words: str) -> None:
        """Note a promise that does not hold."""
        if not holds:
            self.broken.append(f"{promise}: {words}")


def chaos(seed: int) -> tuple[Plan, Result]:
    """One run, checked."""
    plan, result = Plan(seed), Result()
    before = _alive()
    # the streams of an iterable data set are one for each worker
    whole = plan.loader(plan.data(faults=False), 1 if plan.stream is None else plan.workers[0])
    reference = [sample for _ in range(plan.epochs) for sample in _samples(whole)]
    del whole
    dataset = plan.data(faults=True)
    try:
        _run(plan, dataset, result)
    except Exception as error:
        result.broken.append(f"P1: the run ended with {type(error).__name__}: {error}")
    else:
        _check(plan, result, reference)
        _check_begun(plan, dataset, result)
    for key, (kind, _) in plan.faults.items():
        result.injected[kind] += dataset.begun[key] if kind == "corrupt output" else dataset.struck[key]
    if _alive() - before:
        gc.collect()  # memory goes with its last view, and errors keep some in cycles
    end = time.monotonic() + _GONE_S
    while (left := _alive() - before) and time.monotonic() < end:
        time.sleep(0.01)
    result.check("P7", not left, f"left behind: {sorted(left)}")
    return plan, result


def _run(plan: Plan, dataset: Any, result: Result) -> None:
    state: dict[str, Any] = {}
    given = 0
    for steps, workers in zip([*plan.steps, None], plan.workers, strict=True):
        loader = plan.loader(copy.copy(dataset), workers)  # threads would go on with the state of a stream
        loader.load_state_dict(state)
        for _ in range(plan.epochs - state.get("epoch", 0) if steps is None else 1):
            iterator = iter(loader)
            batches: Iterable[Any] = iterator if steps is None else islice(iterator, steps)
            for batch in batches:
                result.received += _samples([batch])
                given += 1
                if given == plan.murder:
                    _murder(iterator, plan.seed, result)
            state = _stored(loader.state_dict())
            _account(loader, result)
            del batches, iterator
        del loader
        if not state["begun"] and state["epoch"] == plan.epochs:
            break
        result.injected["resume"] += steps is not None


def _stored(state: dict[str, Any]) -> dict[str, Any]:
    """The state as another process reads it: from JSON, or where a sampler's own holds tensors, without pickles."""
    try:
        return dict(json.loads(json.dumps(state)))
    except TypeError:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return dict(torch.load(file, weights_only=True))


def _murder(iterator: Any, seed: int, result: Result) -> None:
    """Kill a worker from outside, whatever it is at."""
    pids = iterator._engine.pump.lanes["cpu"].pids
    try:
        os.kill(pids[seed % len(pids)], signal.SIGKILL)
    except ProcessLookupError:
        return  # it had died already
    result.injected["killed from outside"] += 1


def _account(loader: Any, result: Result) -> None:
    stats = loader.stats()
    result.failures += stats["failures"]
    result.lateness = max(result.lateness, stats["lateness"]["max"])
    result.peak_bytes = max(result.peak_bytes, stats["bytes_in_flight_peak"])
    result.stalls |= stats["stalls"].keys()
    for name in ("samples_failed", "samples_repeated", "batches_delivered"):
        result.totals[name] += stats[name]
    for name, count in stats["workers"].items():
        result.totals[f"workers_{name}"] += count


def _samples(batches: Iterable[Any]) -> list[Sample]:
    """Each sample: its key, its draw, its length, and whether all of it is that draw."""
    return [
        (sample[0].item(), sample[1].item(), len(sample), bool((sample[1:] == sample[1]).all()))
        for batch in batches
        for sample in (batch["value"] if isinstance(batch, dict) else batch)
    ]


def _check(plan: Plan, result: Result, reference: list[Sample]) -> None:
    sampler = range(plan.samples) if plan.stream is not None else plan.sampler()
    order = [key for _ in range(plan.epochs) for key in sampler]
    failed = [int(failure["index"]) for failure in result.failures]
    received = [int(sample[0]) for sample in result.received]
    missing, extra = Counter(order), Counter([*received, *failed])
    result.check("P1", missing == extra, f"missing {missing - extra}, extra {extra - missing}")
    bad = set(failed)
    good = sorted(sample for sample in reference if int(sample[0]) not in bad)
    partly = [sample for sample in result.received if int(sample[0]) in bad]  # failed another time
    whole = sorted(sample for sample in result.received if int(sample[0]) not in bad)
    if plan.stream is not None:  # nothing is promised of what it draws
        whole, good = ([(sample[0], *sample[2:]) for sample in side] for side in (whole, good))
    result.check("P2", whole == good and set(partly) <= set(reference), "content differs")
    result.check("P3", result.lateness <= plan.lateness, f"{result.lateness} batches late")
    if not plan.lateness:
        following = iter(int(sample[0]) for sample in reference)
        result.check("P3", all(key in following for key in received), "the order differs")
    if plan.budget is not None:
        # what each slot is at is beyond it, and so are the oldest batch, which may always proceed, and its joined copy
        most = max(plan.budget, plan.batch * MOST_BYTES) + (max(plan.workers) + plan.batch) * MOST_BYTES
        result.check("P4", result.peak_bytes <= most, f"{result.peak_bytes} bytes in flight, {most} allowed")
    result.check("P5", result.stalls <= _CAUSES, f"stalls for {result.stalls - _CAUSES}")
    doomed = plan.doomed & set(order)
    result.check("P6", doomed <= bad <= doomed | plan.risky, f"failed: {sorted(bad)}, doomed: {sorted(doomed)}")
    result.check("P6", result.totals["samples_failed"] == len(failed), "failures and their count differ")
    known = ("epoch", "position", "lane", "error")
    nameless = [one for one in result.failures if any(one[name] is None for name in known)]
    result.check("P6", not nameless, f"failures that tell too little: {nameless}")


def _check_begun(plan: Plan, dataset: Any, result: Result) -> None:
    """No sample is begun again without a cause: only deaths, and being given up with its loader, are causes. Workers
    that persist begin an epoch ahead that nobody may ask for."""
    if plan.persistent or result.injected["resume"] or result.totals["workers_died"] or result.totals["workers_hung"]:
        return
    again = sum(dataset.begun) - plan.samples * plan.epochs
    # a chunk that was tried without seeds and drew is done once more by each worker
    result.check("P5", again <= 0 or not plan.threads, f"{again} samples were begun again")


def _alive() -> set[str]:
    """What a loader could leave behind."""
    found = {f"process {pid}" for task in Path("/proc/self/task").iterdir() for pid in _children(task)}
    found |= {f"thread {thread.name}" for thread in threading.enumerate() if thread.name.startswith("minato-")}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "minato-" in str(entry.readlink()):
                found.add(f"memory {entry.readlink()} ({entry.name})")
        except FileNotFoundError:  # the directory handle of this listing
            continue
    return found


def _children(task: Path) -> Iterator[str]:
    try:
        yield from (task / "children").read_text().split()
    except FileNotFoundError:
        return


def _row(seed: int, plan: Plan, result: Result, seconds: float) -> dict[str, Any]:
    return {
        "seed": seed,
        "content": plan.content,
        "workers": plan.workers,
        "threads": plan.threads,
        "lateness": plan.lateness,
        "budget_bytes": plan.budget,
        "sampling": plan.sampling,
        "stream": plan.stream,
        "epochs": plan.epochs,
        "persistent": plan.persistent,
        "samples": plan.samples,
        "injected": dict(result.injected),
        "delivered": len(result.received),
        **result.totals,
        "broken": result.broken,
        "elapsed_s": seconds,
    }


def run(seed: int) -> dict[str, Any]:
    """One run and its row."""
    begin = time.perf_counter()
    plan, result = chaos(seed)
    return _row(seed, plan, result, time.perf_counter() - begin)


@click.command(help=__doc__)
@click.option("--seeds", type=click.IntRange(min=1), default=50, show_default=True, help="How many runs.")
@click.option("--first-seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--processes", type=click.IntRange(min=1), default=1, show_default=True, help="Runs at a time.")
@click.option(
    "--json",
    "json_path",
    metavar="PATH",
    callback=writable,
    help="Write the figures as JSON; - for standard output. A file that is there is gone on with: runs that it has are "
    "not done again. It is written after every few runs.",
)
def main(seeds: int, first_seed: int, processes: int, json_path: str | None) -> None:
    quietly()
    report.end_in_order()
    path = None if json_path in (None, "-") else Path(str(json_path))
    rows = record(run, range(first_seed, first_seed + seeds), processes, path)
    if json_path == "-":
        write(document(rows), "-")
    else:
        samples = sum(row["delivered"] for row in rows.values())
        report.print_table(f"chaos: {len(rows)} runs, {samples} samples", summary(rows), _COLUMNS)
    if any(row["broken"] for row in rows.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
