"""``python -m tests.mutations [NAME]...``: put faults into copies of the tree, one at a time, and see who notices.

NAME is a part of a fault's name, or of its file's; all faults if none is given. Ends with a count for each file of the
catalogue, and with status 1 where a fault went unnoticed. The share that the table notices, with no other test:

    python -m tests.mutations --only contracts/test_table.py --in content --in scheduling
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from tests.mutations.catalogue import BY_FILE
from tests.mutations.trying import Result, copied, try_all


@click.command()
@click.argument("names", nargs=-1)
@click.option("--in", "files", multiple=True, type=click.Choice(list(BY_FILE)), help="Only this file of the catalogue.")
@click.option("--only", multiple=True, help="Run this test (below tests/) in place of the likely ones.")
@click.option("--processes", default=2, show_default=True, help="How many faults are tried at once.")
@click.option("--whole", is_flag=True, help="Run the whole suite where the likely tests notice nothing.")
@click.option("--limit", default=600.0, show_default=True, help="Seconds for each file of tests.")
def main(
    names: tuple[str, ...],
    files: tuple[str, ...],
    only: tuple[str, ...],
    processes: int,
    whole: bool,
    limit: float,
) -> None:
    """Put faults into copies of the tree, one at a time, and tell which test noticed each."""
    chosen = {
        fault: file
        for file in files or BY_FILE
        for fault in BY_FILE[file]
        if not names or any(name in f"{fault.name} {fault.file}" for name in names)
    }
    missed: list[str] = []

    def told(result: Result) -> None:
        if result.caught_by is None:
            missed.append(result.fault.name)
        click.echo(f"{result.seconds:6.1f} s  {result.fault.name}: {result.caught_by or 'NOBODY NOTICED'}")

    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        trees = [copied(Path(folder) / str(number)) for number in range(min(processes, len(chosen)))]
        if trees:
            try_all(list(chosen), trees, told, only=only, whole=whole, limit_s=limit)
    for name in missed:
        click.echo(f"nobody noticed: {name}")
    for file in dict.fromkeys(chosen.values()):
        of_file = [fault.name for fault, where in chosen.items() if where == file]
        click.echo(f"{file}: {len({*of_file} - {*missed})} of {len(of_file)} noticed")
    click.echo(f"all: {len(chosen) - len(missed)} of {len(chosen)} noticed")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
