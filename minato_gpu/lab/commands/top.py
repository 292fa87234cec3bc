"""``minato-gpu top``: what the loaders of a running job do, seen from another terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from minato_gpu.lab.commands.common import plain_errors
from minato_gpu.lab.console import open_console

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_COMMAND_SHOWN = 40  # characters of how a job was called


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
                with Live(console=console, auto_refresh=False) as shown:
                    for each in views:
                        shown.update(each, refresh=True)
        except KeyboardInterrupt:
            console.print()


def _views(pid: int, interval: float, width: int) -> Iterator[RenderableType]:
    """Yields what to print of two looks at a process, again and again. Raises NoAnswer once the process has ended."""
    from rich.console import Group

    from minato_gpu.lab.top import view
    from minato_gpu.lab.top.client import ask

    before = ask(pid)
    while True:
        time.sleep(interval)
        now = ask(pid)
        yield Group(*view.job(before, now, width))
        before = now


def _the_job(console: Console) -> int:
    """Returns the process id of this user's only job. Raises ClickException where there is none, or several."""
    from minato_gpu.lab.top.client import JobState, ask_all

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
