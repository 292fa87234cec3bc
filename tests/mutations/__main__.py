"""``python -m tests.mutations [NAME]...``: put faults into copies of the tree, one at a time, and see who notices.

NAME is a part of a fault's name, or of its file's; all faults if none is given. Ends with status 1 where one went
unnoticed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from tests.mutations.catalogue import ALL
from tests.mutations.trying import Result, copied, try_all


@click.command()
@click.argument("names", nargs=-1)
@click.option("--processes", default=2, show_default=True, help="How many faults are tried at once.")
@click.option("--whole", is_flag=True, help="Run the whole suite where the likely tests notice nothing.")
@click.option("--limit", default=240.0, show_default=True, help="Seconds for each file of tests.")
def main(names: tuple[str, ...], processes: int, whole: bool, limit: float) -> None:
    """Put faults into copies of the tree, one at a time, and tell which test noticed each."""
    chosen = [fault for fault in ALL if not names or any(name in f"{fault.name} {fault.file}" for name in names)]
    missed: list[str] = []

    def told(result: Result) -> None:
        if result.caught_by is None:
            missed.append(result.fault.name)
        click.echo(f"{result.seconds:6.1f} s  {result.fault.name}: {result.caught_by or 'NOBODY NOTICED'}")

    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        trees = [copied(Path(folder) / str(number)) for number in range(min(processes, len(chosen)))]
        if trees:
            try_all(chosen, trees, told, whole=whole, limit_s=limit)
    click.echo(f"{len(chosen) - len(missed)} of {len(chosen)} noticed")
    for name in missed:
        click.echo(f"nobody noticed: {name}")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
