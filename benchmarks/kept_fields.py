"""What a cache keeps where fields of a pipeline may be kept: the split that the loader chooses, beside all others.

Samples are read from a server that gives 50 MB/s to all, and prepared by two workers: decoding, of which nothing is
drawn, in 3.5 ms, and cropping in 0.5 ms (mostly slept, so that reading and preparing do not share the cores). Decoded
they are three times as large, and the cache has room for all raw bytes and a quarter more, or for 42 % of the samples
decoded. No more than 32 MB are read ahead (256 otherwise), or that would be a cache of the whole set. After the epochs
in which the cache fills:

    fields, raw     shares of the samples that are kept decoded, and as they were read
    epoch_s         seconds of an epoch
    of_uncached     the same by that without a cache
    of_best         the same by the best of the splits that were tried
"""

from __future__ import annotations

from functools import partial
from time import perf_counter, sleep
from typing import Any, NamedTuple

import click
import numpy as np
from torch.utils.data import RandomSampler

from benchmarks import report
from benchmarks.isolate import isolated
from benchmarks.throttle import Throttle, content, server
from benchmarks.turns import in_turns
from minato_gpu import DataLoader, Source, read_bytes
from minato_gpu.caching.split import Means, Shares
from minato_gpu.engine import building
from minato_gpu.pipeline import Field, Pipeline, Stage
from minato_gpu.sources import fields as kept_fields
from minato_gpu.sources.blocks import space_of
from minato_gpu.sources.process import ReaderSettings
from minato_gpu.stages import Fields, Params

NBYTES = 200_000
LARGER = 3  # times: what is decoded
RATE = 50e6
LATENCY_MS = 2.0
WORKERS = 2
BATCH = 16
DECODE_S, CROP_S = 3.5e-3, 0.5e-3
ROOM = 1.25  # times all raw bytes: the cache
_AHEAD = 32 << 20
_COLUMNS = ("split", "fields", "raw", "epoch_s", "epoch_spread_s", "of_uncached", "of_best")


class Objects:
    """Sample k is object k."""

    def __init__(self, address: str, count: int) -> None:
        self.address, self.count = address, count

    def __len__(self) -> int:
        return self.count

    def source(self, key: int) -> Source:
        """The object."""
        return Source(f"{self.address}/{key}.bin", 0, NBYTES)

    def __getitem__(self, key: int) -> dict[str, Any]:
        return {"source": self.source(key), "key": key}


def _read(fields: Fields, _: Params) -> Fields:
    return {"data": read_bytes(fields["source"])}


def _sleep_until(end: float) -> None:
    sleep(max(0.0, end - perf_counter()))


def _decode(fields: Fields, _: Params) -> Fields:
    end = perf_counter() + DECODE_S
    picture = np.tile(fields["data"], LARGER)
    _sleep_until(end)
    return {"picture": picture}


def _draw(rng: np.random.Generator, _: Fields) -> Params:
    return {"at": int(rng.integers(0, LARGER))}


def _crop(fields: Fields, params: Params) -> Fields:
    end = perf_counter() + CROP_S
    at = NBYTES * int(params["at"])
    if not np.array_equal(fields["picture"][at : at + NBYTES], content(fields["key"], NBYTES)):
        raise AssertionError(f"object {fields['key']} has other bytes")
    _sleep_until(end)
    return {"number": np.int64(fields["key"])}


PIPELINE = Pipeline(
    (
        Stage("read", ("source",), {"data": Field(np.uint8, (NBYTES,))}, _read),
        Stage("decode", ("data",), {"picture": Field(np.uint8, (LARGER * NBYTES,))}, _decode),
        Stage("crop", ("picture", "key"), {"number": Field(np.int64)}, _crop, draw=_draw),
    ),
    outputs=("number",),
)


class Case(NamedTuple):
    """``shares``: what is kept, as it is told; None: as the loader chooses. ``cached``: whether there is a cache."""

    name: str
    samples: int
    shares: Shares | None = None
    cached: bool = True


class Measured(NamedTuple):
    """Seconds of an epoch, and shares that are kept."""

    epoch_s: float
    fields: float
    raw: float


def measure(case: Case, epochs: int) -> Measured:
    """Two epochs fill the cache, and one more changes it where what is known by then changes the choice."""
    # this process is for nothing else
    building.ReaderSettings = partial(ReaderSettings, ahead_bytes=_AHEAD)  # type: ignore[assignment,attr-defined]
    if (told := case.shares) is not None:

        def as_told(means: Means, budget: float, *, keeps_raw: bool = True) -> Shares:
            return told

        kept_fields.split = as_told  # type: ignore[attr-defined]
    with server(Throttle(LATENCY_MS, rate=RATE), NBYTES) as address:
        objects: Any = Objects(address, case.samples)
        loader: Any = DataLoader(
            objects,
            BATCH,
            sampler=RandomSampler(objects),
            num_workers=WORKERS,
            pipeline=PIPELINE,
            persistent_workers=True,
            cache=round(ROOM * case.samples * space_of(NBYTES)) if case.cached else None,
        )
        seconds = []
        for _ in range(3 + epochs if case.cached else 1 + epochs):
            begin = perf_counter()
            keys = sorted(int(key) for batch in loader for key in batch["number"])
            seconds.append(perf_counter() - begin)
            if keys != list(range(case.samples)):
                raise AssertionError("other samples than the sampler's were delivered")
        kept = loader.stats().get("cache", {}).get("memory", {"fields": 0, "copies": 0})
    fields, raw = (part / case.samples for part in (kept["fields"], kept["copies"] - kept["fields"]))
    return Measured(float(np.mean(seconds[-epochs:])), fields, raw)


def cases(count: int, *, quick: bool) -> list[Case]:
    """No cache, what is chosen, and splits between all raw and all decoded."""
    larger = space_of(LARGER * NBYTES) / space_of(NBYTES)
    steps = 1 if quick else 4
    decoded = [ROOM / larger * at / steps for at in range(steps + 1)]
    told = [Shares(share, max(0.0, min(1 - share, ROOM - larger * share))) for share in decoded]
    found = [Case(f"{shares.fields:.0%} decoded, {shares.raw:.0%} raw", count, shares) for shares in told]
    return [Case("no cache", count, cached=False), Case("chosen", count), *found]


@click.command(help=__doc__)
@report.command
def main(json_path: str | None, quick: bool, repetitions: int | None) -> None:
    count, epochs, times = (64, 1, 1) if quick else (1000, 2, repetitions or 3)
    all_cases = cases(count, quick=quick)
    name = f"kept fields, {count} objects"

    def measured(case: Case) -> Measured:
        return isolated(measure, case, epochs, timeout_s=600.0)

    runs, errors = in_turns(name, all_cases, times, measured, lambda found: f"{found.epoch_s:.2f} s an epoch")
    means = {case: float(np.mean([each.epoch_s for each in some])) for case, some in runs.items() if some}
    best = min((means[case.name] for case in all_cases if case.shares is not None and case.name in means), default=0.0)
    rows: list[dict[str, Any]] = []
    for case, some in runs.items():
        row: dict[str, Any] = {"case": name, "split": case}
        if some:
            row |= {"fields": some[-1].fields, "raw": some[-1].raw}
            row |= report.summarise("epoch", [each.epoch_s for each in some], "_s")
            row |= {"of_best": means[case] / best if best else 0.0}
            if all_cases[0].name in means:
                row["of_uncached"] = means[case] / means[all_cases[0].name]
        rows.append(row | ({"error": errors[case]} if case in errors else {}))
    settings = {"objects": count, "repetitions": times, "workers": WORKERS, "bytes_per_s": RATE, "quick": quick}
    report.publish(report.document("kept_fields", settings, rows), json_path, _COLUMNS)
    if errors:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
