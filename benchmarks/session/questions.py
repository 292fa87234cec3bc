"""What the part ``checks`` asks of decoding, contexts, errors and memory: each question is a function that is run in a
process of its own, and answers yes or no."""

from __future__ import annotations

import ctypes
import importlib
import math
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from time import process_time
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.isolate import excerpt
from benchmarks.session import loaders, steps
from benchmarks.session.gpu_tests import ended
from benchmarks.session.measure import MOST_REPEATED
from benchmarks.session.settings import Settings
from benchmarks.session.work import MIXED, job
from minato_gpu import DataLoader
from minato_gpu.device import nvjpeg
from minato_gpu.device.accelerator import is_out_of_memory
from minato_gpu.device.executor import DeviceExecutor
from minato_gpu.pipeline import Field, Pipeline, Stage, TorchFunction
from minato_gpu.samples import StageError
from pipelines import decoding, image_classification

Answer = tuple[bool, dict[str, Any]]

_LATE_S = 20.0


# --- decoding ----------------------------------------------------------------------------------------------------


def new_enough(settings: Settings) -> Answer:
    """Whether nvJPEG is one that nvImageCodec gives regions to."""
    version = nvjpeg.found()
    return nvjpeg.decodes_regions(), {"nvjpeg": version and ".".join(map(str, version))}


def decodes_there(settings: Settings) -> Answer:
    """CPU seconds of all threads for a photograph: by the CPU lane, on the device by regions (unless they are known to
    break it), and whole."""
    count = 4 if settings.quick else 64
    pipeline, split, items = photographs(settings, count)
    begin = process_time()
    for fields, seed in items:
        pipeline.run(fields, seed, start=split)
    found = {"cpu_s_cpu_lane": (process_time() - begin) / count}
    for regions in (True, False) if nvjpeg.decodes_regions() else (False,):
        with mock.patch.object(nvjpeg, "decodes_regions", lambda regions=regions: regions):
            executor = executor_of(settings, pipeline, split, count)
            made(executor.run(items))
            steps.synchronise(settings.device)
            begin = process_time()
            made(executor.run(items))
            steps.synchronise(settings.device)
            found["cpu_s_regions" if regions else "cpu_s_whole"] = (process_time() - begin) / count
            executor.close()
    used = found["cpu_s_regions" if nvjpeg.decodes_regions() else "cpu_s_whole"]
    return used < 0.5 * found["cpu_s_cpu_lane"], found


def photographs(settings: Settings, count: int) -> tuple[Pipeline, int, list[tuple[Any, int]]]:
    """The pipeline, where the device lane begins, and what the host has read of photographs."""
    source, pipeline = image_classification.dataset(settings.folder), image_classification.build(settings.size)
    split = pipeline.host_prefix
    return pipeline, split, [(pipeline.run(source[n % len(source)], n, stop=split), n) for n in range(count)]


def executor_of(settings: Settings, pipeline: Pipeline, split: int, count: int) -> DeviceExecutor:
    return DeviceExecutor(pipeline, split, device=settings.device, max_batch=count, threads=4)


def made(results: Sequence[Any]) -> Sequence[Any]:
    """The results of an executor. Raises the first error among them: a question about what the device does must not be
    answered by what it has not done."""
    for one in results:
        if isinstance(one, StageError):
            raise RuntimeError(f"the device could not make a sample: {one}") from one
    return results


def made_by_device(loader: Any) -> None:
    """Raises RuntimeError where the CPU has stood in for a loader's device lane."""
    stats = loader.stats()
    repeated, retired = stats["samples_repeated"], stats["device_lane"]["retired"]
    if repeated > MOST_REPEATED * stats["samples_delivered"] or retired:
        raise RuntimeError(f"the CPU has stood in for the device lane: {repeated} samples repeated, {retired=}")


# --- contexts ----------------------------------------------------------------------------------------------------


def no_context(settings: Settings) -> Answer:
    """Whether a process has no context on its first GPU after it has imported nvImageCodec."""
    before = has_context(ctypes.CDLL("libcuda.so.1"))
    importlib.import_module("nvidia.nvimgcodec")
    after = has_context(ctypes.CDLL("libcuda.so.1"))
    return not after, {"context_before": before}


def has_context(driver: Any, device: int = 0) -> bool:
    """Whether this process has a primary context on a GPU, by the driver's own word."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    for status in (
        driver.cuInit(0),
        driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)),
    ):
        if status:
            raise RuntimeError(f"the CUDA driver answers with error {status}")
    return bool(active.value)


def forked_decodes(settings: Settings) -> Answer:
    """Whether a child that is forked after CUDA was met has nvImageCodec, and decodes with it."""
    torch.zeros(1, device="cuda").sum().item()
    _, _, items = photographs(settings, 1)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_decode, args=(theirs, items[0][0]))
    child.start()
    theirs.close()
    try:
        told = ours.recv()
    except EOFError:
        told = {"library": False, "decoded": False}
    child.join()
    return told["library"] and told["decoded"], {**told, "exit": child.exitcode}


def _decode(connection: Any, fields: Any) -> None:
    with mock.patch.object(decoding, "get_worker_info", object):
        library = decoding.library() is not None
        box = tuple(int(n) for n in fields["box"])
        decoded = decoding.decode_box(fields["encoded"], box).shape[:2] == box[2:]  # type: ignore[arg-type]
    connection.send({"library": library, "decoded": decoded})


def workers_without_context(settings: Settings) -> Answer:
    """How many processes NVML sees on the GPU while workers prepare photographs."""
    nvml = importlib.import_module("pynvml")
    loader = loaders.ours(settings.workers)[0].make(job(settings, MIXED, 8 * settings.batch), settings.device)
    batches = iter(loader)
    next(batches)
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    count = len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return count <= 1, {"processes": count}


# --- errors and memory -------------------------------------------------------------------------------------------


def broken_costs_no_graph(settings: Settings) -> Answer:
    """A micro-batch with one file that is no photograph, and the next."""
    count = 4 if settings.quick else 64
    pipeline, split, items = photographs(settings, count)
    executor = executor_of(settings, pipeline, split, count)
    executor.run(items)
    builds = executor.builds
    spoilt = [({**items[1][0], "encoded": np.full(1000, 7, np.uint8)}, 1)]
    results = [*executor.run([items[0], *spoilt, *items[2:]]), *executor.run(items)]
    failed = sum(isinstance(one, StageError) for one in results)
    figures = {"graphs_built": executor.builds - builds, "repeated": executor.batches.repeated, "failed": failed}
    executor.close()
    return figures["graphs_built"] == 0 and failed <= 1, figures


def pools_are_shared(settings: Settings) -> Answer:
    """PyTorch's pool keeps all but 300 MB of the device, none of it in use, when DALI is asked to decode."""
    pipeline, split, items = photographs(settings, 64)
    torch.zeros(1, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    _fill_pool(free - 300_000_000)
    executor = executor_of(settings, pipeline, split, 64)
    failed = short = 0
    try:
        failed = sum(isinstance(one, StageError) for one in executor.run(items))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        short = 1
    figures = {"short_of_memory": short, "repeated": executor.batches.repeated, "failed": failed}
    executor.close()
    return not any(figures.values()), figures


def _fill_pool(nbytes: int) -> None:
    """Take as much of the device, in pieces of a gigabyte and what is left, and let go of it: PyTorch keeps it."""
    sizes = [1 << 30] * (nbytes >> 30) + [nbytes % (1 << 30)]
    taken = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    del taken


def late_errors_are_told(settings: Settings) -> Answer:
    """A stage's kernel fails after the stage has returned: whether the consumer is told, and nothing is left then.

    From then on PyTorch ends the process (SIGABRT) where it frees pinned memory, or memory that several streams have
    used: an error of CUDA's in a destructor. So all of it happens in a child, which sends what it knows at once.
    ``ended`` is how that went on; ``said``, where it went wrong, what was written to its standard error.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    figures: dict[str, Any] = {"told": "", "threads_left": None}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        child = context.Process(target=_meet_late_error, args=(theirs, complaints.fileno()))
        child.start()
        theirs.close()
        end = time.monotonic() + _LATE_S
        with suppress(EOFError):
            while ours.poll(end - time.monotonic()):
                figures |= ours.recv()
        child.join(max(0.0, end - time.monotonic()))
        figures["ended"] = ended(child.exitcode)
        child.kill()
        child.join()
        if figures["ended"] != ended(0):
            complaints.seek(0)
            figures["said"] = excerpt(complaints.read())
    return "assert" in figures["told"] and figures["threads_left"] == [], figures


def _meet_late_error(connection: Any, complaints: int) -> None:
    """Sends what the consumer was told, then the threads that are left."""
    os.dup2(complaints, 2)
    field = Field(np.float32, (4,))
    read = Stage("read", ("n",), {"x": field}, cpu=_read)
    later = Stage("later", ("x",), {"x": field}, cpu=_as_it_is, device=TorchFunction(_fails_later))
    pipeline = Pipeline((read, later), outputs=("x",), name="late")
    source: Any = [{"n": number} for number in range(64)]
    before = set(threading.enumerate())  # those of another loader may be there
    try:
        for _ in DataLoader(source, 8, num_workers=1, device="cuda", pipeline=pipeline, lanes=["device"]):
            pass
    except Exception as error:
        connection.send({"told": str(error).strip().splitlines()[-1]})  # before anything is freed
    left = [thread.name for thread in {*threading.enumerate()} - before if thread.name.startswith("minato-")]
    connection.send({"threads_left": left})
    connection.close()


def _read(fields: Any, params: Any) -> Any:
    return {"x": np.full(4, fields["n"], np.float32)}


def _as_it_is(fields: Any, params: Any) -> Any:
    return {"x": fields["x"]}


def _fails_later(fields: Any, params: Any) -> Any:
    assert_later(fields["x"][0] != 5)
    return _as_it_is(fields, params)


def assert_later(holds: torch.Tensor) -> None:
    """By a kernel, of which nobody hears before it has run."""
    torch._assert_async(holds)


def few_batches(settings: Settings) -> Answer:
    """What a loader has on the device while its consumer is away, where no budget is named."""
    loader = loaders.ours(settings.workers)[2].make(job(settings, MIXED, 40 * settings.batch), settings.device)
    batches = iter(loader)
    next(batches)
    time.sleep(5.0)
    made_by_device(loader)
    stats, batch = loader.stats(), settings.batch * 3 * settings.size**2 * 4
    peak = int(stats["device"]["device_bytes_peak"])
    return peak <= math.ceil(3.5 * batch), {
        "device_bytes_peak": peak,
        "batch_bytes": batch,
        "spilled_to_host": stats["device_lane"]["spilled_to_host"],
    }
