"""What the part ``checks`` asks of waiting: who holds up whom, and for how long (see ``questions``)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.session import loaders, measure
from benchmarks.session.harm import longest_gap
from benchmarks.session.questions import Answer, executor_of, made, made_by_device, photographs
from benchmarks.session.settings import Settings
from benchmarks.session.work import MIXED, job
from minato_gpu.device.accelerator import Accelerator
from minato_gpu.device.staging import Download, Upload
from minato_gpu.device.values import to_numpy
from minato_gpu.pipeline import DaliFragment, Field, Pipeline, Stage, TorchFunction

_SECOND = 2_000_000_000  # cycles of a kernel that keeps a stream busy
_MOST_S = 1e-3
_MOST_OPENING_S = 0.1
_PAUSES, _PAUSE_S = 200, 20e-3
_PAUSES_S, _PAUSES_END_S = 4.0, 8.0  # for them, and from the loader's start on


def upload_is_asynchronous(settings: Settings) -> Answer:
    """Whether the host is back while the stream is still busy with what came before."""
    device, values = Accelerator(torch.device("cuda")), [np.ones((500, 500), np.float32), np.array(3)]
    upload = Upload(device)
    waits = not _returns_early(device, lambda: [torch.tensor(value, device="cuda") for value in values])
    return _returns_early(device, lambda: upload.bring(values)), {"torch_tensor_waits": waits}


def download_is_asynchronous(settings: Settings) -> Answer:
    """The same for what a micro-batch of 64 leaves for the host."""
    device = Accelerator(torch.device("cuda"))
    tensors = [torch.full((100 + n, 100), float(n), device="cuda") for n in range(64)]
    return _returns_early(device, lambda: Download(device, tensors)), {}


def micro_batch_is_asynchronous(settings: Settings) -> Answer:
    """Whether a micro-batch is issued, its outputs' copies among it, while its stream is busy with what came before."""
    pipeline, split, items = photographs(settings, 16)
    executor, device = executor_of(settings, pipeline, split, 16), Accelerator(torch.device("cuda"))
    return _returns_early(device, lambda: made(executor.run(items, torch.cuda.current_stream()))), {}


def release_is_asynchronous(settings: Settings) -> Answer:
    """Whether the lane's thread goes on when it lets go of DALI's outputs while another stream is busy."""
    pipeline, split, items = photographs(settings, 16)
    device = Accelerator(torch.device("cuda"))
    executors = [executor_of(settings, pipeline, split, 16) for _ in range(2)]
    stream = device.stream()
    for executor in executors:
        with device.working(stream):
            made(executor.run(items, stream))
    torch.cuda.synchronize()
    return _returns_early(device, lambda: executors.pop().sweep()), {}


def capture_beside_the_lane(settings: Settings) -> Answer:
    """Whether the training thread can capture a CUDA graph with ``capture_error_mode="thread_local"``, as
    minato_gpu/manual/gpus.md says, while the lane and the copies' thread are at work."""
    loader = loaders.ours(settings.workers)[1].make(job(settings, MIXED), settings.device)
    batches, graph, x = iter(loader), torch.cuda.CUDAGraph(), torch.ones(1000, device="cuda")
    next(batches)
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(2000):
                x = x * 1.0
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return False, {"told": str(error)}
    made_by_device(loader)
    return bool((x == 1.0).all()), {}


def _returns_early(device: Accelerator, issue: Callable[[], Any]) -> bool:
    """Whether ``issue`` returns before a kernel that was there first is through. It is called before, so that memory
    which it needs is in the pools."""
    with device.working(device.stream()):
        issue()
        torch.cuda.synchronize()
        torch.cuda._sleep(_SECOND)
        kept = issue()
        early = not device.event().query()
    torch.cuda.synchronize()
    del kept
    return early


def feeding_stops_nobody(settings: Settings) -> Answer:
    """The longest gap of a thread that reads the clock while 64 inputs of 500 KB are fed, medians of ten runs."""
    field = Field(np.uint8, (None,))
    stage = Stage("flip", ("x",), {"x": field}, cpu=_inverted, device=DaliFragment(_inverted_by_dali))
    pipeline = Pipeline((stage,), outputs=("x",), inputs={"x": field}, name="feeding")
    count = 4 if settings.quick else 64
    executor = executor_of(settings, pipeline, 0, count)
    items = [({"x": np.full(500_000, n, np.uint8)}, n) for n in range(count)]
    made(executor.run(items))
    gaps = sorted(_gap_during(lambda: executor.run(items)) for _ in range(10))
    made(executor.run(items))
    executor.close()
    return gaps[5] < _MOST_S, {"gap_s": gaps[5], "gap_max_s": gaps[-1]}


def spoilt_inputs_change_nothing(settings: Settings) -> Answer:
    """Whether inputs are held for as long as DALI reads them: their memory is used again once results are there."""
    field = Field(np.uint8, (None,))
    stage = Stage("flip", ("x",), {"x": field}, cpu=_inverted, device=DaliFragment(_inverted_by_dali))
    pipeline = Pipeline((stage,), outputs=("x",), inputs={"x": field}, name="feeding")
    count, rounds = (4, 3) if settings.quick else (64, 200)
    executor, arrays, wrong = executor_of(settings, pipeline, 0, count), np.zeros((count, 50_000), np.uint8), 0
    for number in range(rounds):
        arrays[:] = number % 200
        results = executor.run([({"x": row}, n) for n, row in enumerate(arrays)])
        arrays[:] = 201
        wrong += sum(not (to_numpy(one["x"]) == 255 - number % 200).all() for one in results if isinstance(one, dict))
        wrong += sum(not isinstance(one, dict) for one in results)
    executor.close()
    return not wrong, {"wrong": wrong}


def resident_inputs_are_read_in_time(settings: Settings) -> Answer:
    """A graph reads what a torch stage makes on the device, behind work that keeps the stream busy: whether that is
    what it reads. Whether the host has waited for it is told."""
    field = Field(np.uint8, (None,))
    add = Stage("add", ("x",), {"x": field}, cpu=_inverted, device=TorchFunction(_one_more))
    flip = Stage("flip", ("x",), {"x": field}, cpu=_inverted, device=DaliFragment(_inverted_by_dali))
    pipeline = Pipeline((add, flip), outputs=("x",), inputs={"x": field}, name="resident")
    count, rounds = (4, 3) if settings.quick else (64, 50)
    executor, wrong, early = executor_of(settings, pipeline, 0, count), 0, 0
    device = Accelerator(torch.device("cuda")) if settings.device == "cuda" else None
    stream = None if device is None else device.stream()
    for number in range(rounds):
        items = [({"x": np.full(50_000, (number + n) % 200, np.uint8)}, n) for n in range(count)]
        with nullcontext() if device is None or stream is None else device.working(stream):
            if device is not None:
                torch.cuda._sleep(_SECOND // 100)
            results = executor.run(items, stream)
            early += device is not None and not device.event().query()
        found = [to_numpy(one["x"]) if isinstance(one, dict) else None for one in results]
        wrong += sum(one is None or not (one == 254 - (number + n) % 200).all() for n, one in enumerate(found))
    executor.close()
    return not wrong, {"wrong": wrong, "issued_early": early / rounds}


def _one_more(fields: Any, params: Any) -> Any:
    return {"x": fields["x"] + 1}


def opening_stops_nobody(settings: Settings) -> Answer:
    """The longest time that another thread is stopped while a lane opens, in a process that has met CUDA as one that
    trains has: by the import of DALI, by the first graph, for which libraries load their own, and by another graph."""
    measure.begin(settings)
    pipeline, split, _ = photographs(settings, 1)
    first, again = (executor_of(settings, pipeline, split, 4 if settings.quick else 64) for _ in range(2))
    gaps: list[float] = []
    figures: dict[str, float] = {}
    parts: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("import", first.load),
        ("build", partial(first.build, {})),
        ("again", partial(again.build, {})),
    )
    for part, function in parts:
        begin = perf_counter()
        gaps.append(_gap_during(function))
        figures |= {f"{part}_gap_s": gaps[-1], f"{part}_s": perf_counter() - begin}
    if not (first.built and again.built):
        raise RuntimeError("the graphs could not be built; the log has the error")
    for executor in (first, again):
        executor.close()
    return max(gaps) < _MOST_OPENING_S, figures


def _inverted(fields: Any, params: Any) -> Any:
    return {"x": 255 - fields["x"]}


def _inverted_by_dali(dali: Any, fields: Any, params: Any, device: str) -> Any:
    return {"x": dali.fn.cast(255 - fields["x"], dtype=dali.types.UINT8)}


def _gap_during(function: Callable[[], Any]) -> float:
    """The longest time that this thread is stopped while another runs the function."""
    thread, longest = threading.Thread(target=function), 0.0
    thread.start()
    while thread.is_alive():
        longest = max(longest, longest_gap(1e-3))
    return longest


def pauses_are_short(settings: Settings) -> Answer:
    """The longest gaps of a training thread that computes in Python for 20 ms at a time, by their 99th percentile.

    It computes for about as long as it waits for batches, so that a slow lane is at work all the time and does not take
    the time of most of the gaps. All is over in less than ten seconds: ``pauses`` says how many gaps there were.
    """
    begun = perf_counter()
    loader = loaders.ours(settings.workers)[1].make(job(settings, MIXED), settings.device)
    batches, count = iter(loader), 3 if settings.quick else _PAUSES
    next(batches)
    gaps: list[float] = []
    waited = perf_counter() - begun
    end = begun + min(waited + _PAUSES_S, _PAUSES_END_S)
    while True:
        gaps += [longest_gap(_PAUSE_S) for _ in range(max(1, round(min(waited, _PAUSES_S / 4) / _PAUSE_S)))]
        asked = perf_counter()
        if len(gaps) >= count or asked >= end:
            break
        next(batches)
        waited = perf_counter() - asked
    made_by_device(loader)
    p99 = float(np.percentile(gaps, 99))
    return p99 < _MOST_S, {"pause_p50_s": float(np.median(gaps)), "pause_p99_s": p99, "pauses": len(gaps)}
