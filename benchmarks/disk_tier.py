"""What copies on disk cost in a directory of very many: keeping one, a hit, giving one up, opening the directory, and
an eviction of a twentieth.

``hit`` is of a thousand copies drawn at random, in turns of a directory of a thousand and of the large one, after bare
reads of all have brought them into the page cache; ``ratio`` is to a hit among a thousand. ``open`` follows a run that
has ended, ``open after a death`` one that was killed: then all is counted anew. ``evict`` includes the scan of all
copies.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np

from benchmarks import report
from minato_gpu.sources.disk import LEAST_BUDGET
from minato_gpu.sources.disk.entry import disk_space_of, name_of
from minato_gpu.sources.disk.tier import DiskTier

Row = dict[str, Any]
_VERSION = b"1"
_FEW = 1000
_COLUMNS = ("what", "entries", "bytes", "us", "us_spread", "seconds", "ratio")


def budget_of(entries: int, nbytes: int) -> int:
    """A budget in which so many copies of so many bytes have just room."""
    return max((entries * disk_space_of(nbytes) + (1 << 20)) * 64 // 63 + 1, LEAST_BUDGET)


class Copies:
    """A directory of ``entries`` copies of ``nbytes`` bytes, which fill its budget."""

    def __init__(self, path: Path, entries: int, nbytes: int) -> None:
        self.path, self.entries, self.nbytes = path, entries, nbytes
        self.budget = budget_of(entries, nbytes)
        self.tier = DiskTier(path, self.budget)
        self.content = memoryview(np.random.default_rng(nbytes).bytes(nbytes))
        self.into = memoryview(bytearray(nbytes))

    def key(self, number: int) -> bytes:
        """Of a copy; spread over all folders."""
        return (number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)).to_bytes(16, "big")

    def fill(self) -> Row:
        """Keep them all."""
        times = [self.timed(lambda number=number: self.keep(number)) for number in range(self.entries)]  # type: ignore[misc]
        return self.row("keep a copy", times) | {"seconds": sum(times)}

    def keep(self, number: int) -> None:
        """Write one."""
        if not self.tier.write(self.key(number), _VERSION, self.content):
            raise RuntimeError(f"copy {number} was not kept: {self.tier.stats()}")

    def drawn(self) -> list[int]:
        """Some that the page cache has."""
        numbers = [int(number) for number in np.random.default_rng(0).permutation(self.entries)[:_FEW]]
        for number in numbers:
            (self.path / name_of(self.key(number))).read_bytes()
        return numbers

    def found(self, number: int) -> None:
        """Read one."""
        if self.tier.read(self.key(number), _VERSION, lambda _: self.into) is None:
            raise RuntimeError(f"copy {number} was not found: {self.tier.stats()}")

    def opened(self, what: str) -> Row:
        """Open it again, after a run that has ended or died."""
        self.tier.close()
        if what == "open after a death" and (child := os.fork()) == 0:
            self.tier = DiskTier(self.path, self.budget)
            os._exit(0)
        elif what == "open after a death" and os.waitpid(child, 0)[1]:
            raise RuntimeError("the process that was to die in the directory has failed")
        return self.row(what, seconds=self.timed(self.open))

    def open(self) -> None:
        """As a new run, in its second epoch."""
        self.tier = DiskTier(self.path, self.budget)
        for _ in range(2):
            self.tier.begin_epoch()

    def evicted(self) -> Row:
        """Make room of a twentieth."""
        eviction, before = self.tier._eviction, self.tier.room().copies
        assert eviction is not None
        seconds = self.timed(lambda: eviction.make_room(self.entries // 20 * disk_space_of(self.nbytes)))
        return self.row("evict", seconds=seconds) | {"what": f"evict {before - self.tier.room().copies}"}

    def row(self, what: str, times: list[float] | None = None, seconds: float | None = None) -> Row:
        """What it took."""
        found: Row = {"what": what, "entries": self.entries, "bytes": self.nbytes, "seconds": seconds}
        return found | (report.summarise("", [each * 1e6 for each in times], "us") if times else {})

    @staticmethod
    def timed(act: Callable[[], object]) -> float:
        """Seconds that it takes."""
        begin = perf_counter()
        act()
        return perf_counter() - begin


def rows(folder: Path | None, entries: int, nbytes: int, repetitions: int) -> list[Row]:
    """All of them, measured in a new folder of ``folder``, which goes afterwards."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="disk-tier-") as made:
        both = few, many = [
            Copies(Path(made) / f"{count}", count, nbytes) for count in (min(_FEW, entries // 2), entries)
        ]
        found = [each.fill() for each in both]
        times: tuple[list[float], list[float]] = ([], [])
        for numbers in list(zip(few.drawn(), many.drawn(), strict=False)) * repetitions:
            for some, each, number in zip(times, both, numbers, strict=True):
                some.append(each.timed(partial(each.found, number)))
        found += [each.row("hit", some) for each, some in zip(both, times, strict=True)]
        found[-1]["ratio"] = report.median(times[1]) / report.median(times[0])
        found += [many.opened("open"), many.opened("open after a death"), many.evicted()]
        few.tier.close()
        many.tier.remove([many.key(number) for number in range(entries - _FEW, entries)])
        many.tier.close()
    return found


@click.command(help=__doc__)
@report.command
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="On the disk to be measured; without it, that of temporary files.",
)
@click.option("--entries", default=100_000, show_default=True, help="Copies in the large directory.")
@click.option("--bytes", "nbytes", default=10_000, show_default=True, help="Of each.")
def main(
    json_path: str | None, quick: bool, repetitions: int | None, folder: Path | None, entries: int, nbytes: int
) -> None:
    entries, repetitions = 200 if quick else entries, repetitions or (1 if quick else 5)
    found = rows(folder, entries, nbytes, repetitions)
    settings = {"repetitions": repetitions, "quick": quick}
    report.publish(report.document("disk_tier", settings, found), json_path, _COLUMNS)


if __name__ == "__main__":
    main()
