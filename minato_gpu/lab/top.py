"""``minato-gpu top``: asks a training process how its loaders stand, and shows what they do between two answers.

It asks on the socket on which observe/stats_socket.py listens. A wait, or a lease of a worker, is counted when it is
over: shares are of what ended meanwhile, and never above 1.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import click

from minato_gpu.lab.commands.common import plain_errors
from minato_gpu.lab.console import Column, open_console, table
from minato_gpu.memory.private_folder import PrivateFolder
from minato_gpu.observe.counters import Counts, counters
from minato_gpu.observe.stats_socket import PROTOCOL
from minato_gpu.samples import JSON

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

TIMEOUT_S = 5.0
_COMMAND_SHOWN = 40  # characters of how a job was called
_BAR = 20  # characters


@click.command(short_help="Watch the loaders of a running job.")
@click.argument("pid", type=click.IntRange(min=1), required=False)
@click.option("--once", is_flag=True, help="Print one table and end, as it does where output is no terminal.")
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, help="Seconds between two looks.")
@click.pass_context
def top(context: click.Context, pid: int | None, once: bool, interval: float) -> None:
    """Watch the loaders of process PID, one of your own that trains; Ctrl-C ends it, and the job goes on.

    Without PID it finds the job, or names them where there are several. Rates are of the time between two looks; a wait
    is counted when it is over. Exits with 1 where there is no job, or it ends meanwhile.
    """
    from rich.live import Live

    console = open_console(None)
    with plain_errors(context):
        views = _views(_the_job(console) if pid is None else pid, interval, console.width)
        try:
            if once or not console.is_terminal:
                console.print(next(views))
            else:
                with Live(console=console, auto_refresh=False) as live:
                    for each in views:
                        live.update(each, refresh=True)
        except KeyboardInterrupt:
            console.print()


def _views(pid: int, interval: float, width: int) -> Iterator[RenderableType]:
    """Yields what to print of two looks at a process, again and again. Raises NoAnswer once the process has ended."""
    from rich.console import Group

    before = ask(pid)
    while True:
        time.sleep(interval)
        now = ask(pid)
        yield Group(*shown(before, now, width))
        before = now


def _the_job(console: Console) -> int:
    """Returns the process id of this user's only job. Raises ClickException where there is none, or several."""
    answers = list(ask_all())
    jobs = [each for each in answers if isinstance(each, JobState)]
    for silent in answers:
        if not isinstance(silent, JobState):
            console.print(f"left out: {silent}", markup=False)
    if len(jobs) == 1:
        return jobs[0].pid
    if not jobs:
        raise click.ClickException("no process of yours has a loader with workers at work on this machine")
    known = ", ".join(f"{job.pid} ({job.command[-_COMMAND_SHOWN:]})" for job in jobs)
    raise click.ClickException(f"there are {len(jobs)} jobs: {known}; name one: minato-gpu top {jobs[0].pid}")


# --- asking ---------------------------------------------------------------------------------------------------------


class NoAnswer(Exception):
    """A process could not be asked, or no loader of this version answered. The message says why."""


class LoaderState(NamedTuple):
    """A loader's state at ``at_s`` (seconds, of that process's own clock)."""

    name: str
    epoch: int
    at_s: float
    stats: dict[str, JSON]


class JobState(NamedTuple):
    """The states of a process's loaders."""

    pid: int
    command: str  # command line, without the interpreter
    rank: str | None  # of a distributed job; None: it is none
    loaders: list[LoaderState]


def ask(pid: int, timeout: float = TIMEOUT_S) -> JobState:
    """Asks process ``pid``, and waits for each piece of its answer ``timeout`` seconds at most. Raises NoAnswer."""
    with closing(_folder()) as folder:
        return _asked(folder, pid, timeout)


def ask_all() -> Iterator[JobState | NoAnswer]:
    """Asks every process of this user that listens; yields its answer, or why it gave none.

    Sockets that killed processes have left are removed. Raises NoAnswer where no process can be asked at all.
    """
    with closing(_folder()) as folder:
        for pid in folder.pids():
            folder.remove_stale(pid)
        for pid in folder.pids():
            try:
                yield _asked(folder, pid, TIMEOUT_S)
            except NoAnswer as error:
                yield error


def _folder() -> PrivateFolder:
    try:
        return PrivateFolder()
    except OSError as error:
        raise NoAnswer(f"no process can be asked: {error}") from error


def _asked(folder: PrivateFolder, pid: int, timeout: float) -> JobState:
    try:
        with folder.connect(pid, timeout) as connection, connection.makefile("rb") as stream:
            answer = stream.read()
        if not answer:  # it was killed as it was asked
            raise ConnectionResetError
    except (FileNotFoundError, ConnectionError) as error:
        folder.remove_stale(pid)
        raise NoAnswer(
            f"process {pid} has no loader with workers at work, or has ended (nothing listens in {folder.path})"
        ) from error
    except TimeoutError as error:
        raise NoAnswer(f"process {pid} does not answer within {timeout:g} seconds") from error
    except OSError as error:
        raise NoAnswer(f"process {pid} cannot be asked: {error}") from error
    try:
        return _parsed(answer)
    except (ValueError, KeyError, TypeError) as error:
        raise NoAnswer(f"what answers for process {pid} in {folder.path} is no loader of this version") from error


def _parsed(answer: bytes) -> JobState:
    """Parses an answer. Raises ValueError, KeyError or TypeError if it is not one."""
    first, *lines = map(json.loads, answer.decode().splitlines())
    if first["protocol"] != PROTOCOL:
        raise ValueError
    loaders = [LoaderState(line["loader"], line["epoch"], line["at_s"], line["stats"]) for line in lines]
    return JobState(first["pid"], first["command"], first.get("rank"), loaders)


# --- what is shown --------------------------------------------------------------------------------------------------


def shown(before: JobState | None, now: JobState, width: int) -> list[RenderableType]:
    """Returns what to print of the process and each loader, ``width`` characters wide; rates as in ``rates_of``."""
    from rich.text import Text

    rank = "" if now.rank is None else f", rank {now.rank}"
    title = Text(f"process {now.pid}{rank}: {now.command}", style="italic", overflow="ellipsis", no_wrap=True)
    if not now.loaders:
        return [title, Text("no loader has begun an epoch")]
    earlier = {} if before is None else {each.name: each for each in before.loaders}
    return [title, *(part for each in now.loaders for part in _loader(earlier.get(each.name), each, width))]


def _loader(before: LoaderState | None, now: LoaderState, width: int) -> Iterable[RenderableType]:
    from rich.text import Text

    rates = rates_of(before, now)
    yield Text("")
    first, *rest = _lines(now, rates)
    yield Text(first[:width], style="bold")
    yield from (Text(line[:width]) for line in rest)
    lanes = now.stats["lanes"]
    yield table(
        [
            Column("lane", list(lanes)),
            Column("slots", [str(lane["slots"]) for lane in lanes.values()], number=True),
            Column("busy", [f"{_busy(name, lanes[name], rates):.0%}" for name in lanes], number=True),
            Column("samples/s", [_number(rates["lane_samples", name]) for name in lanes], number=True),
            *(
                Column(heading, [_number(1e3 * lane["service_s"][quantile]) for lane in lanes.values()], number=True)
                for heading, quantile in (("service p50 ms", "p50"), ("p99 ms", "p99"))
            ),
        ],
        width,
    )


def rates_of(before: LoaderState | None, now: LoaderState) -> Counts:
    """Returns the growth of counters a second since ``before``, or since the epoch began if that is None or of another
    epoch."""
    old: Counts = {}
    seconds = now.stats["elapsed_s"]
    if before is not None and before.epoch == now.epoch:
        old, seconds = counters(before.stats), now.at_s - before.at_s
    counts = counters(now.stats)
    return {key: max(0.0, count - old.get(key, 0.0)) / max(seconds, 1e-9) for key, count in counts.items()}


def _lines(now: LoaderState, rates: Counts) -> Iterator[str]:
    """Yields the lines above the table of a loader's lanes."""
    from rich.filesize import decimal

    stats = now.stats
    yield f"{now.name}  epoch {now.epoch}  {_progress(stats['samples_delivered'], stats['samples_expected'])}"
    waits = {cause: rate for (name, cause), rate in rates.items() if name == "wait_seconds"}
    causes = [
        f"{cause} {min(1.0, waits[cause]):.0%}"
        for cause in sorted(stats["stalls"], key=lambda each: -waits[each])
        if waits[cause] >= 0.005
    ]
    said = f"the training loop waited {min(1.0, sum(waits.values())):.0%}{': ' if causes else ''}{', '.join(causes)}"
    yield f"{_number(rates['samples', ''])} samples/s; {said}"
    failed = stats["samples_failed"] + stats["samples_skipped"]
    in_flight, peak = decimal(stats["bytes_in_flight"]), decimal(stats["bytes_in_flight_peak"])
    yield f"{failed:,} samples failed; {in_flight} in flight, {peak} at most"
    if longest := next(iter(stats.get("longest_waits", ())), None):
        yield _longest_wait(longest)
    storage = []
    if ("reads", "") in rates:
        nbytes = decimal(round(rates["read_bytes", ""]))
        storage.append(f"{_number(rates['reads', ''])} reads/s, {nbytes}/s")
    if hits := [f"{tier} {_hits(tier, rates, counters(stats))}" for tier in stats.get("cache", {})]:
        storage.append(f"cache hits: {', '.join(hits)}")
    shared = stats.get("share")
    if shared and (had := shared["granted"] + shared["copied"] + shared["again"]):
        storage.append(f"{shared['copied'] / had:.0%} of the samples copied from other loaders")
    if storage:
        yield "; ".join(storage)


def _busy(name: str, lane: Mapping[str, JSON], rates: Counts) -> float:
    share: float = rates["lane_busy_seconds", name] / max(lane["slots"], 1)
    return min(1.0, share)


def _hits(tier: str, *counted: Counts) -> str:
    """Returns the hit share of the first of these counts in which anything was asked for; "-" if in none."""
    for each in counted:
        hits = each.get(("cache_hits", tier), 0.0)
        if asked := hits + each.get(("cache_misses", tier), 0.0):
            return f"{hits / asked:.0%}"
    return "-"


def _longest_wait(wait: Mapping[str, JSON]) -> str:
    """An entry of ``stats()["longest_waits"]`` in words."""
    causes = sorted(wait["causes"].items(), key=lambda item: -item[1])
    said = ", ".join(f"{cause} {_number(seconds)} s" for cause, seconds in causes)
    last = "" if wait["lane"] is None else f"; last came {wait['key']!r} of lane {wait['lane']}"
    return f"longest wait {_number(wait['seconds'])} s, for batch {wait['batch']}: {said}{last}"


def _progress(delivered: int, expected: int | None) -> str:
    if not expected:
        return f"{delivered:,} samples"
    share = min(1.0, delivered / expected)
    full = round(share * _BAR)
    return f"[{'#' * full}{'.' * (_BAR - full)}] {share:.0%}  {delivered:,} of {expected:,}"


def _number(value: float) -> str:
    """Returns the number in text, with about three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
