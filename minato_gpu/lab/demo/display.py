"""What the demonstration shows on the terminal while it works: live bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column as TableColumn

from minato_gpu import DataLoader
from minato_gpu.lab.demo.training import Tally, Watch
from minato_gpu.samples import JSON

# Statistics cost the consumer's time, so they are asked for a few times in a second, not with every batch.
_EVERY_S = 0.2


@contextmanager
def making(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar for the files being made; yields the function that takes (done, count)."""
    columns = (TextColumn("making photographs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, count: progress.update(task, completed=done, total=count)


@contextmanager
def training(console: Console, epochs: int) -> Iterator[Watch]:
    """Shows a bar for each epoch of the training; yields the function that updates it."""
    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(table_column=TableColumn(no_wrap=True)),
        TextColumn("{task.fields[figures]}", table_column=TableColumn(no_wrap=True)),
    )
    tasks: dict[int, TaskID] = {}  # by epoch
    shown_at = 0.0
    with Progress(*columns, console=console, expand=True) as progress:

        def watch(tally: Tally, loader: DataLoader[Any], over: bool) -> None:
            nonlocal shown_at
            now, begins = perf_counter(), tally.epoch not in tasks
            if begins:
                name = f"{tally.epoch + 1}/{epochs}"
                tasks[tally.epoch] = progress.add_task("", total=tally.samples_expected, epoch=name, figures="")
            if begins or over or now - shown_at >= _EVERY_S:
                shown_at = now
                said = figures(tally, loader.stats())
                progress.update(tasks[tally.epoch], completed=tally.samples, figures=said)

        yield watch


def figures(tally: Tally, stats: Mapping[str, JSON]) -> str:
    """Rate, the lanes' shares of the samples, the consumer's wait; short enough for 80 columns beside a bar."""
    elapsed = tally.elapsed_s or 1e-9
    lanes = {lane: known["samples"] for lane, known in stats["lanes"].items()}
    total = sum(lanes.values()) or 1
    shares = " ".join(f"{lane} {count / total:4.0%}" for lane, count in lanes.items())
    waiting = stats["wait_s"]["total"] / elapsed
    return f"{tally.samples / elapsed:6,.0f} samples/s  {shares}  wait {waiting:4.0%}"
