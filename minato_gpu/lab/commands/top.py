"""``minato-gpu top``: what the loaders of a running job do, seen from another terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from minato_gpu.lab.commands.common import CommandOutput, shows

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from minato_gpu.lab.top.client import JobState

_COMMAND_SHOWN = 40  # characters of how a job was called


@click.command(short_help="Watch the loaders of a running job.")
@click.argument("pid", type=click.IntRange(min=1), required=False)
@click.option("--once", is_flag=True, help="Print one table and end, as it does where output is no terminal.")
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, help="Seconds between two looks.")
@shows
def top(out: CommandOutput, pid: int | None, once: bool, interval: float) -> None:
    """Watch the loaders of process PID, one of your own that trains; Ctrl-C ends it, and the job goes on.

    Without PID it finds the job, or names them where there are several. Rates are of the time between two looks; a wait
    is counted when it is over. Exits with 1 where there is no job, or it ends meanwhile.
    """
    from minato_gpu.lab.top.client import ask

    pid = _the_job(out) if pid is None else pid
    rows: list[dict[str, Any]] = []
    views = _views(pid, ask(pid), interval, out.console.width, rows)
    try:
        if once or not out.console.is_terminal:
            out.console.print(next(views))
        else:
            _live(out.console, views)
    except KeyboardInterrupt:
        out.console.print()
    finally:
        if rows:
            out.leave_rows({"command": "top", "interval_s": interval}, rows)


def _views(
    pid: int, before: JobState, interval: float, width: int, rows: list[dict[str, Any]]
) -> Iterator[RenderableType]:
    """Two looks at a process after each other, again and again. ``rows``: always the last figures."""
    from rich.console import Group

    from minato_gpu.lab.top import view
    from minato_gpu.lab.top.client import ask
    from minato_gpu.lab.top.figures import figures

    while True:
        time.sleep(interval)
        now = ask(pid)
        earlier = {each.name: each for each in before.loaders}
        found = [figures(earlier.get(each.name), each) for each in now.loaders]
        rows[:] = [{"pid": now.pid, "rank": now.rank, **each.row()} for each in found]
        yield Group(*view.job(now, found, width))
        before = now


def _live(console: Console, views: Iterator[RenderableType]) -> None:
    """Shows figures until the job ends, or Ctrl-C."""
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as shown:
        for each in views:
            shown.update(each, refresh=True)


def _the_job(out: CommandOutput) -> int:
    """The only one. Raises ClickException where there is none, or several."""
    from minato_gpu.lab.top.client import JobState, ask_all

    answers = list(ask_all())
    jobs = [each for each in answers if isinstance(each, JobState)]
    for silent in answers:
        if not isinstance(silent, JobState):
            out.console.print(f"left out: {silent}", markup=False)
    if len(jobs) == 1:
        return jobs[0].pid
    if not jobs:
        raise click.ClickException("no process of yours has a loader with workers at work on this machine")
    known = ", ".join(f"{job.pid} ({job.command[-_COMMAND_SHOWN:]})" for job in jobs)
    raise click.ClickException(f"there are {len(jobs)} jobs: {known}; name one: minato-gpu top {jobs[0].pid}")
