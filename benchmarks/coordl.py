"""The table of CoorDL (Mohan et al., VLDB 2021), with sizes divided by 10,000 and storage that gives 4 MB/s.

    found    what this loader does, or a simulated cache of files that have one size; misses are those of the second and
             third epoch
    paper    what was measured there: two servers with 500 GiB, of which the data set was 1 / 0.35 or 1 / 0.65

``page cache``: Linux's two lists and refault distance (``benchmarks.cache_replay.PageCacheModel``), with as many
gigabytes as the paper's servers have. ``what if``: by how much the predicted epoch differs from the measured one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.cache_replay import Items, page_cache_hits, replay
from benchmarks.cached_epochs import PREPARE_S, RATE, Case, measure, model_s
from benchmarks.isolate import isolated
from benchmarks.node_prepared import EIGHT as PREPARING
from benchmarks.node_prepared import prepared
from benchmarks.node_share import EIGHT as READING
from benchmarks.node_share import shared
from minato_gpu.lab.analysis.virtual_epochs import Shuffles

_EPOCHS, _KEYS, _GIGABYTES = 3, 16_000, 500
_SETS = {0.35: 314, 0.65: 1290}  # objects of 50 KB: ImageNet-1k (146 GiB), OpenImages (645 GB)
_PAPER = {  # misses: of the page cache, and of CoorDL
    0.35: {"lru": None, "page cache": 0.85, "minio": 0.65, "this loader": 0.65},
    0.65: {"lru": None, "page cache": 0.53, "minio": 0.35, "this loader": 0.35},
}


def coordl_rows(*, quick: bool, repetitions: int) -> Iterator[dict[str, Any]]:
    """One figure each."""
    for share, paper in _PAPER.items():
        report.progress(f"{share:.0%} cached")
        orders = Shuffles(400 if quick else _KEYS, 1, 0)
        hits = {
            policy: [len(hit) / orders.keys for hit in replay(policy, orders, Items.equal(orders.keys), share, _EPOCHS)]
            for policy in ("lru", "minio")
        }
        hits["page cache"] = page_cache_hits(orders, orders.keys, share, _EPOCHS, _GIGABYTES)
        what = f"misses, {share:.0%} cached"
        for policy in ("lru", "page cache", "minio"):
            missed = 1 - float(np.mean(hits[policy][1:]))
            yield _row(what, f"{policy}, simulated", paper[policy]) | {"found": missed}
        count = 64 if quick else _SETS[share]
        case = Case("one rank", 1, True, count, share, RATE * (10 if quick else 1), PREPARE_S, 1, _EPOCHS - 1)
        runs = [isolated(measure, case, timeout_s=600.0) for _ in range(repetitions)]
        missed_of = [float(np.mean(each.reads)) / count for each in runs]
        yield _row(what, "this loader", paper["this loader"]) | report.summarise("found", missed_of)
        off = [abs(float(np.mean(each.seconds)) / model_s(case, each.prepare_s) - 1) for each in runs]
        yield _row(f"what if, {share:.0%} cached: off by", "this loader", 0.04) | report.summarise("found", off)
    for row in shared(quick=quick, repetitions=repetitions, cases=READING, samples=600):
        paper_times = 1.0 if "share" in row["loader"] else 7.0
        yield _row("eight jobs: times the set is read", row["loader"], paper_times) | _found(row, "times_read")
    for row in prepared(steps=4 if quick else 60, repetitions=repetitions, cases=PREPARING):
        yield _row("eight jobs: times it is prepared", row["loader"]) | _found(row, "prepared_share")
        yield _row("eight jobs: CPU, ms a sample", row["loader"]) | _found(row, "cpu_s")


def _row(what: str, by: str, paper: float | None = None) -> dict[str, Any]:
    return {"case": "CoorDL", "what": what, "by": by, "paper": paper}


def _found(row: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a figure of a row and its spread, as ``found``."""
    if "error" in row:
        return {"error": row["error"]}
    return {f"found{key.removeprefix(name)}": value for key, value in row.items() if key.startswith(name)}
