"""Runs the machine for as long as asked: ``make chaos SECONDS=600 SEED=...``.

Prints the seed, how many runs and steps there were and what was done in them. Where something is wrong, a program is
printed that fails by itself, the shortest that was found, and the exit status is 1.
"""

from __future__ import annotations

import random
import time
import warnings
from typing import Any

import click
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from benchmarks import report
from minato_gpu.lab.commands.common import writable
from minato_gpu.lab.report import write
from tests.contracts.machine import Machine

STEPS = 30
_RUNS = 20  # between two looks at the clock
SETTINGS = settings(
    max_examples=_RUNS,
    stateful_step_count=STEPS,
    deadline=None,
    database=None,
    print_blob=False,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
_PROGRAM = """from tests.contracts.machine import Case, Machine

machine = Machine()
try:
    {}
finally:
    machine.teardown()
"""


def program(calls: list[str]) -> str:
    """A program of calls of a machine."""
    return _PROGRAM.format("\n    ".join(calls))


def run(seconds: float, first: int) -> BaseException | None:
    """Run machines, and at least some; the error where one failed."""
    end = time.monotonic() + seconds
    number = first
    while True:
        try:
            run_state_machine_as_test(seed(number)(Machine), settings=SETTINGS)
        except (Exception, ExceptionGroup) as error:
            return error
        number += 1
        if time.monotonic() > end:
            return None


@click.command(help=__doc__)
@click.option("--seconds", type=click.FloatRange(min=0), default=60, show_default=True)
@click.option("--seed", "first", type=click.IntRange(min=0), help="A random one if not given.")
@click.option("--json", "path", metavar="PATH", callback=writable, help="Write the counts as JSON.")
def main(seconds: float, first: int | None, path: str | None) -> None:
    torch.set_num_threads(1)  # they would be in each other's way
    warnings.simplefilter("error")
    for usual in ("This DataLoader will create", "This process .* is multi-threaded"):
        warnings.filterwarnings("ignore", usual)
    first = random.SystemRandom().randrange(1 << 32) if first is None else first
    report.progress(f"seed {first}")
    begin = time.monotonic()
    error = run(seconds, first)
    took = time.monotonic() - begin
    counts: dict[str, Any] = dict(sorted(Machine.counts.items()))
    if path is not None:
        figures = {"seed": first, "elapsed_s": round(took, 1), "failed": error is not None, "counts": counts}
        write(report.document("chaos", figures, []), path)
    if path != "-":
        lines = [{"what": what, "count": count} for what, count in counts.items()]
        report.print_table(f"seed {first}, {took:.0f} s", lines, ("what", "count"))
    if error is not None:
        shortest = min(Machine.failed, key=len, default=[])
        click.echo(f"\nseed {first}: {type(error).__name__}: {error}\n\n{program(shortest)}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
