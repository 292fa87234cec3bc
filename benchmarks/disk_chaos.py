"""Chaos on disk: processes that share a cache are killed, the disk is full, files are damaged; nothing wrong is served.

Each seed is a directory and a few rounds. In a round two or three processes write, find, read and remove copies at
random, let go of some after a use, and begin epochs, whereupon copies that others have left make room. Of these some
kill themselves (SIGKILL) in the middle of a write to a segment, or before or after a transaction, a cut, a hole or a
deletion; some are killed from outside at a random moment; for some the disk is full from some write on. Meanwhile and
between rounds segments are damaged, shortened and deleted, and between rounds the index is damaged and shortened.

After each round what the directory takes on disk is compared with the budget, and after the last one everything is
read again, with nobody else there: each copy is what was written or is missing, accounts and files agree, only a
damaged index has emptied the cache, and what is removed is free on disk.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import seeded_runs
from benchmarks.disk_faults import be_full, be_killed, damage_between, damage_segment
from minato_gpu.notices import LOGGER
from minato_gpu.sources.disk.records import Entry, allotted
from minato_gpu.sources.disk.tier import DiskTier

BUDGET = 4 << 20
SEGMENT = 1 << 20
_KEYS, _VERSIONS = 120, 2
_WRONG = 3  # a child's exit code
Content = dict[tuple[bytes, bytes], bytes]


@dataclass
class Result:
    """What was done in one run, and what was wrong, in words (nothing should be)."""

    injected: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    entries: int = 0

    def check(self, holds: bool, words: str) -> None:
        """Note what does not hold."""
        if not holds:
            self.broken.append(words)


def contents(seed: int) -> Content:
    """What each key is in each version."""
    random_ = random.Random(seed)
    return {
        (b"key %d" % key, b"version %d" % version): random_.randbytes(random_.choice((1, 5000, 60_000, 150_000)))
        for key in range(_KEYS)
        for version in range(_VERSIONS)
    }


def chaos(seed: int, folder: Path) -> Result:
    """One run in a new directory of ``folder``, checked."""
    result, choose, content = Result(), random.Random(seed), contents(seed)
    path = Path(tempfile.mkdtemp(dir=folder, prefix="chaos-")) / "cache"
    try:
        hurt = False
        for _ in range(choose.randint(2, 3)):
            hurt |= (path / "index" / "data.mdb").exists() and damage_between(path, choose, result.injected)
            _round(path, content, choose, result)
            result.check(hurt or not (path / "emptied").exists(), "a sound index was thrown away")
            (path / "emptied").unlink(missing_ok=True)
            result.check(_disk_bytes(path) <= BUDGET, f"{_disk_bytes(path)} bytes on disk after a round")
        _check_whole(path, content, result)
    finally:
        shutil.rmtree(path.parent)
    return result


def _round(path: Path, content: Content, choose: random.Random, result: Result) -> None:
    context = multiprocessing.get_context("fork")
    children = []
    for _ in range(choose.randint(2, 3)):
        fault = choose.choice(("killed within", "killed from outside", "disk full", "disk full", "none"))
        child = context.Process(target=_child, args=(path, content, choose.random(), fault))
        child.start()
        children.append((child, fault))
    for child, fault in children:
        if fault == "killed from outside":
            child.join(choose.uniform(0, 0.1))
            result.injected[fault] += child.exitcode is None
            child.kill()
        elif choose.random() < 0.3:
            damage_segment(path, choose, result.injected)
    for child, fault in children:
        child.join()
        killed = child.exitcode == -signal.SIGKILL
        if fault == "disk full" or (killed and fault == "killed within"):
            result.injected[fault] += 1
        result.check(child.exitcode == 0 or (killed and "killed" in fault), f"a process ended with {child.exitcode}")


def _child(path: Path, content: Content, seed: float, fault: str) -> None:
    LOGGER.setLevel(logging.WARNING)
    LOGGER.addFilter(lambda record: _note(path, record))
    choose = random.Random(seed)
    if fault == "killed within":
        be_killed(choose.randint(1, 150), choose)
    elif fault == "disk full":
        be_full(choose.randint(1, 60), choose)
    tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT, run=(f"{seed}", os.getpid()))
    held: list[Entry] = []
    into = memoryview(bytearray(200_000))
    names = list(content)
    usual = names[::_VERSIONS]  # all of one version, so that the cache becomes full
    for _ in range(choose.randint(50, 300)):
        key, version = choose.choice(names if choose.random() < 0.1 else usual)
        act = choose.random()
        if act < 0.4:
            if not tier.write(key, version, memoryview(content[key, version])) and choose.random() < 0.5:
                choose.choice((tier.remove, _let_go(tier)))([choose.choice(names)[0] for _ in range(10)])
        elif act < 0.42:
            choose.choice((tier.remove, _let_go(tier)))([key])
        elif act < 0.45:
            choose.choice((tier.begin_epoch, tier.begin_epoch, tier.tell_uses))()
        elif (entry := tier.find(key, version)) is not None:
            held.append(entry)
            entry = choose.choice(held)  # found long ago, perhaps, and removed since
            if tier.read(entry, into) and into[: entry.length] != content[entry.key, entry.version]:
                os._exit(_WRONG)
    if choose.random() < 0.8:
        tier.close()
    os._exit(0)


def _let_go(tier: DiskTier) -> Callable[[list[bytes]], object]:
    """Removes what has been used, as a run does that knows what others will need."""
    return lambda keys: tier.let_go(keys, lambda others: True)


def _note(path: Path, record: logging.LogRecord) -> bool:
    if "begins anew" in record.getMessage():
        (path / "emptied").touch()
    return False


def _check_whole(path: Path, content: Content, result: Result) -> None:
    LOGGER.setLevel(logging.ERROR)
    tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    into = memoryview(bytearray(200_000))
    for entry in list(tier.entries()):
        if tier.read(entry, into):
            result.check(into[: entry.length] == content[entry.key, entry.version], f"wrong: {entry}")
    entries = list(tier.entries())
    result.entries = len(entries)
    result.check(tier.stats()["off"] is None, f"off: {tier.stats()['off']}")
    empty = tier.nbytes() - sum(allotted(entry.length, 4096) for entry in entries)
    files = {int(file.stem, 16) for file in (path / "segments").iterdir()}
    result.check({entry.segment for entry in entries} <= files, "entries without files")
    tier.remove([entry.key for entry in entries])
    # with the account of the file system's overhead and of the index, which may have grown by some pages
    result.check(abs(tier.nbytes() - empty) <= 64 << 10, f"accounts differ: {empty} and {tier.nbytes()} bytes")
    result.check(_disk_bytes(path / "segments") <= 64 << 10, f"{_disk_bytes(path / 'segments')} bytes are not free")
    key, version = next(iter(content))
    result.check(tier.write(key, version, memoryview(content[key, version])), "nothing can be written any more")
    tier.close()


def _disk_bytes(path: Path) -> int:
    return sum(file.lstat().st_blocks * 512 for file in [path, *path.rglob("*")])


def run(seed: int, folder: Path) -> dict[str, Any]:
    """One run and its row."""
    begin = time.perf_counter()
    result = chaos(seed, folder)
    return {
        "seed": seed,
        "injected": dict(result.injected),
        "entries": result.entries,
        "broken": result.broken,
        "elapsed_s": time.perf_counter() - begin,
    }


main = seeded_runs.command("disk_chaos", run, ("entries",), __doc__ or "")


if __name__ == "__main__":
    main()
