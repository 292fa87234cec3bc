"""The part ``probe``: the ways of decoding JPEGs on this GPU. Which work, are right, also while the stream is busy, and
how fast is each?

Each way in a process of its own, because one of them may end it (nvImageCodec 0.9 with regions on an H100: SIGSEGV).
What is right alone may be wrong beside other work, where nvJPEG's hardware engine writes before its stream's turn: then
it is tried again with a lane that waits for its stream before it decodes. The fastest of those that are right is chosen
for all parts that follow, by the environment (``minato_gpu/device/nvjpeg.py``).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

from benchmarks.report import progress
from benchmarks.session import measure, steps
from benchmarks.session.settings import Request, Row, Settings
from minato_gpu.device import nvjpeg
from minato_gpu.device.accelerator import Accelerator
from minato_gpu.device.executor import DeviceExecutor
from minato_gpu.device.values import to_numpy
from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.samples import StageError
from pipelines import image_classification

DECISION = "decision"

_MOST_LEVELS = 64.0  # of 255, of a single value: beyond, it is another picture
_EACH_S = 25.0
_USUAL_S = 9.0
_BUSY_CYCLES = 350_000_000  # of a kernel: 0.2 s, as long as a training step is at work
_ROUNDS = 5
_IN_FLIGHT = 2  # micro-batches of a lane


@dataclass(frozen=True)
class Way:
    """How JPEGs are decoded."""

    regions: bool
    load: float
    waits: bool = False

    @property
    def name(self) -> str:
        parts = ["regions" if self.regions else "whole", *(["engine"] if self.load else [])]
        return ", ".join([*parts, *(["waiting"] if self.waits else [])])

    @property
    def environment(self) -> dict[str, str]:
        """What makes a lane decode so."""
        return {
            nvjpeg.REGIONS: str(int(self.regions)),
            nvjpeg.ENGINE_LOAD: str(self.load),
            nvjpeg.WAITS: str(int(self.waits)),
        }


WAYS = (Way(True, 0.9), Way(False, 0.9), Way(True, 0.0), Way(False, 0.0))
CAREFUL = Way(False, 0.0, True)
"""Where nothing is known: what is slow and was never reported to be wrong."""


def probe(request: Request) -> Iterator[Row]:
    """A row for each way, then the decision, with the ``environment`` that follows from it."""
    found: list[tuple[Way, Row]] = []
    ways = deque(WAYS)
    while ways:
        way = ways.popleft()
        found.append((way, request.row(way.name, _USUAL_S, _EACH_S, _tried, request.settings, way)))
        yield found[-1][1]
        if found[-1][1].get("wrong_while_busy") and way.load and not way.waits:
            ways.appendleft(Way(way.regions, way.load, True))
    yield decided(found)


def decided(found: Sequence[tuple[Way, Mapping[str, Any]]]) -> Row:
    """The fastest way that is right; the careful one where none is known to be."""
    right = [(row["samples_per_s"], way) for way, row in found if row.get("passed")]
    best = max(right, key=lambda each: float(each[0]), default=None)
    way = CAREFUL if best is None else best[1]
    progress(f"decoding: {way.name}" + ("" if best else ", because no way was found to be right"))
    return {"name": DECISION, "way": way.name, "environment": way.environment, "passed": best is not None}


def decide(rows: Sequence[Mapping[str, Any]]) -> None:
    """Let what was decided hold for this process and its children, unless its user has decided any of it: some of the
    one and some of the other may be a way that is wrong."""
    for row in rows:
        if (row["case"], row["name"]) == ("probe", DECISION) and not row["environment"].keys() & os.environ:
            os.environ.update(row["environment"])


def _tried(settings: Settings, way: Way) -> Row:
    os.environ.update(way.environment)
    measure.begin(settings)
    count = 4 if settings.quick else 64
    pipeline, split, items = photographs(settings, 2 * count)
    sets = [items[:count], items[count:]]
    executor = DeviceExecutor(pipeline, split, device=settings.device, max_batch=count, threads=4)
    alone = [_pictures(executor.run(each)) for each in sets]
    off = _off(pipeline, split, sets[0][:16], alone[0][:16])
    differs = _different([executor.run(each) for each in sets], alone)
    wrong = _wrong_while_busy(executor, sets, alone) if settings.device == "cuda" else 0
    figures: Row = {"max_levels": float(off.max()), "mean_levels": float(off.mean(1).max())}
    figures |= {"differs_alone": differs, "wrong_while_busy": wrong, **_speed(settings, executor, sets)}
    return {**figures, "passed": not differs and not wrong and figures["max_levels"] <= _MOST_LEVELS}


def _pictures(results: Sequence[Any]) -> Any:
    """An executor's results in one array. Raises the first error among them: a question about what the device does must
    not be answered by what it has not done."""
    for one in results:
        if isinstance(one, StageError):
            raise RuntimeError(f"the device could not make a sample: {one}") from one
    return np.stack([to_numpy(one["image"]) for one in results])


def _off(pipeline: Pipeline, split: int, items: Sequence[tuple[Any, int]], found: Any) -> Any:
    """How far samples are from the CPU lane's, in levels: [samples, values]."""
    level = pipeline.fields_at(len(pipeline.stages))["image"].level
    wanted = np.stack([pipeline.run(fields, seed, start=split)["image"] for fields, seed in items])
    return np.abs(found - wanted).reshape(len(wanted), -1) / level


def _wrong_while_busy(executor: DeviceExecutor, sets: Sequence[Any], alone: Sequence[Any]) -> int:
    """How many samples come out otherwise when two micro-batches are issued behind other work, as behind a training
    step: of ``_ROUNDS`` times all."""
    device = Accelerator(torch.device("cuda"))
    stream, wrong = device.stream(), 0
    for _ in range(_ROUNDS):
        with device.working(stream):
            torch.cuda._sleep(_BUSY_CYCLES)
            issued = [executor.run(items, stream) for items in sets]
            done = device.event()
        done.synchronize()
        wrong += _different(issued, alone)
    return wrong


def _different(found: Sequence[Any], alone: Sequence[Any]) -> int:
    """How many samples are not what they were."""
    pairs = zip(found, alone, strict=True)
    return sum(int((_pictures(results) != well).any((1, 2, 3)).sum()) for results, well in pairs)


def _speed(settings: Settings, executor: DeviceExecutor, sets: Sequence[Any]) -> dict[str, float]:
    """As a lane runs: on a stream of its own, two micro-batches in flight."""
    device = Accelerator(torch.device("cuda")) if settings.device == "cuda" else None
    stream = None if device is None else device.stream()
    under_way: deque[tuple[Any, Any]] = deque()
    runs, used, begin = 0, process_time(), perf_counter()
    while perf_counter() - begin < settings.probed_s:
        with nullcontext() if device is None or stream is None else device.working(stream):
            results = executor.run(sets[runs % len(sets)], stream)
            under_way.append((results, None if device is None else device.event()))
        runs += 1
        if len(under_way) == _IN_FLIGHT:
            _, event = under_way.popleft()
            if event is not None:
                event.synchronize()
    steps.synchronise(settings.device)
    took, samples = perf_counter() - begin, runs * len(sets[0])
    return {"samples_per_s": samples / took, "cpu_s_per_sample": (process_time() - used) / samples}


def photographs(settings: Settings, count: int) -> tuple[Pipeline, int, list[tuple[Any, int]]]:
    """The pipeline, where the device lane begins, and what the host has read of photographs."""
    source, pipeline = image_classification.dataset(settings.folder), image_classification.build(settings.size)
    split = pipeline.host_prefix
    return pipeline, split, [(pipeline.run(source[n % len(source)], n, stop=split), n) for n in range(count)]
