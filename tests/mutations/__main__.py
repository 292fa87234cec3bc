"""``python -m tests.mutations [NAME]...``: put faults into copies of the tree, one at a time, and see who notices.

NAME is a part of a fault's name, or of its file's; all faults if none is given. Ends with a count for each file of the
catalogue, and with status 1 where a fault went unnoticed. The share that the table notices, with no other test:

    python -m tests.mutations --only contracts/test_table.py --in content --in scheduling
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter

import click

from tests.mutations.catalogue import BY_FILE
from tests.mutations.fault import Fault
from tests.mutations.trying import caught_by, copied


@click.command()
@click.argument("names", nargs=-1)
@click.option("--in", "files", multiple=True, type=click.Choice(list(BY_FILE)), help="Only this file of the catalogue.")
@click.option("--only", multiple=True, help="Run this test (below tests/) in place of the likely ones.")
@click.option("--processes", default=2, show_default=True, help="How many faults are tried at once.")
def main(names: tuple[str, ...], files: tuple[str, ...], only: tuple[str, ...], processes: int) -> None:
    """Put faults into copies of the tree, one at a time, and tell which test noticed each."""
    chosen = {
        fault: file
        for file in files or BY_FILE
        for fault in BY_FILE[file]
        if not names or any(name in f"{fault.name} {fault.file}" for name in names)
    }
    trees: SimpleQueue[Path] = SimpleQueue()

    def noticed(fault: Fault) -> bool:
        tree, begin = trees.get(), perf_counter()
        try:
            test = caught_by(fault, tree, only)
        finally:
            trees.put(tree)
        click.echo(f"{perf_counter() - begin:6.1f} s  {fault.name}: {test or 'NOBODY NOTICED'}")
        return test is not None

    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, ThreadPoolExecutor(processes) as pool:
        for number in range(min(processes, len(chosen))):
            trees.put(copied(Path(folder) / str(number)))
        missed = [fault for fault, found in zip(chosen, pool.map(noticed, chosen), strict=True) if not found]
    for fault in missed:
        click.echo(f"nobody noticed: {fault.name}")
    for file in dict.fromkeys(chosen.values()):
        of_file = [fault for fault, where in chosen.items() if where == file]
        click.echo(f"{file}: {len({*of_file} - {*missed})} of {len(of_file)} noticed")
    click.echo(f"all: {len(chosen) - len(missed)} of {len(chosen)} noticed")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
