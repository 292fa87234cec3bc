"""What the part ``checks`` asks of waiting: who holds up whom, and for how long (see ``questions``)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.session import loaders
from benchmarks.session.harm import longest_gap
from benchmarks.session.questions import Answer, executor_of, photographs
from benchmarks.session.settings import Settings
from benchmarks.session.work import MIXED, job
from minato_gpu.memory.accelerator import Accelerator, Cuda
from minato_gpu.memory.staging import Download, Upload
from minato_gpu.pipeline import DaliFragment, Field, Pipeline, Stage

_SECOND = 2_000_000_000  # cycles of a kernel that keeps a stream busy
_MOST_S = 1e-3


def upload_is_asynchronous(settings: Settings) -> Answer:
    """Whether the host is back while the stream is still busy with what came before."""
    device, values = Cuda(torch.device("cuda")), [np.ones((500, 500), np.float32), np.array(3)]
    upload = Upload(device)
    waits = not _returns_early(device, lambda: [torch.tensor(value, device="cuda") for value in values])
    return _returns_early(device, lambda: upload.bring(values)), {"torch_tensor_waits": waits}


def download_is_asynchronous(settings: Settings) -> Answer:
    """The same for what a micro-batch of 64 leaves for the host."""
    device = Cuda(torch.device("cuda"))
    tensors = [torch.full((100 + n, 100), float(n), device="cuda") for n in range(64)]
    return _returns_early(device, lambda: Download(device, tensors)), {}


def release_is_asynchronous(settings: Settings) -> Answer:
    """Whether who drops the last view of DALI's outputs goes on while another stream is busy."""
    pipeline, split, items = photographs(settings, 16)
    executor, device = executor_of(settings, pipeline, split, 16), Cuda(torch.device("cuda"))
    stream = device.stream()
    found: list[Any] = []
    for _ in range(3):
        with device.working(stream):
            found.append([device.adopt(one["image"]) for one in executor.run(items, stream) if isinstance(one, dict)])
        torch.cuda.synchronize()

    def let_go() -> None:
        found.pop(0)
        gc.collect()

    return _returns_early(device, let_go), {"outputs": len(found[0])}


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
    executor.run(items)
    gaps = sorted(_gap_during(lambda: executor.run(items)) for _ in range(10))
    executor.close()
    return gaps[5] < _MOST_S, {"gap_s": gaps[5], "gap_max_s": gaps[-1]}


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
    """The longest gaps of a training thread that computes in Python for 20 ms at a time, by their 99th percentile."""
    loader = loaders.ours(settings.workers)[1].make(job(settings, MIXED), settings.device)
    batches, count = iter(loader), 3 if settings.quick else 200
    for _ in range(1 if settings.quick else 5):
        next(batches)
    gaps: list[float] = []
    end = perf_counter() + 15.0
    while len(gaps) < count and perf_counter() < end:
        next(batches)
        gaps.append(longest_gap(20e-3))
    p99 = float(np.percentile(gaps, 99))
    return p99 < _MOST_S, {"pause_p50_s": float(np.median(gaps)), "pause_p99_s": p99, "pauses": len(gaps)}
