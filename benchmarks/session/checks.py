"""The part ``checks``: what was read in the libraries' sources or built on a stand-in, and only a GPU can decide.

Every check is a question with two answers, each with what it means for the project. One that needs a GPU says so where
there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.isolate import MeasurementError, excerpt
from benchmarks.report import progress
from benchmarks.session import questions, waits
from benchmarks.session.questions import Answer
from benchmarks.session.record import NO_TIME, Row
from benchmarks.session.settings import Request, Settings

_EACH_S = 40.0
_USUAL_S = 8.0  # most of a check is to import, and to make a context


@dataclass(frozen=True)
class Check:
    """``ask``: in a process of its own, whether it is as hoped, and figures; ``if_so``, ``if_not``: what it means."""

    name: str
    ask: Callable[[Settings], Answer]
    if_so: str
    if_not: str
    anywhere: bool = False  # it can be asked without a GPU


CHECKS = (
    Check(
        "nvJPEG is given regions",
        questions.new_enough,
        "nothing to do",
        "whole photographs are decoded and cut on the GPU: install nvidia-nvjpeg>=13.2, or what is first in the path",
        anywhere=True,
    ),
    Check(
        "decoding takes no cores",
        questions.decodes_there,
        "photographs are decoded on the GPU",
        "nvImageCodec decodes on the CPU without a word: where cpu_s_whole is less than cpu_s_regions, "
        "nvjpeg.decodes_regions() must say no",
        anywhere=True,
    ),
    Check(
        "importing nvImageCodec makes no context",
        questions.no_context,
        "hiding GPUs from workers is needless, and can go from pipelines/decoding.py",
        "it is needed; a rank must choose its GPU before it imports the library",
    ),
    Check(
        "a worker forked after CUDA decodes with nvImageCodec",
        questions.forked_decodes,
        "nothing to do",
        "such workers fall back to OpenCV, or die: import the library in the training process before the fork",
    ),
    Check(
        "workers have no context",
        questions.workers_without_context,
        "nothing to do",
        "something else in a worker asks CUDA: find it by importing one module after another in a worker",
    ),
    Check(
        "a torch stage's input is not waited for",
        waits.upload_is_asynchronous,
        "nothing to do; torch_tensor_waits says whether it ever mattered",
        "the pinned copy blocks: look at PyTorch's pinned allocator before lanes/functions.py",
    ),
    Check(
        "ragged results go home without a wait",
        waits.download_is_asynchronous,
        "two micro-batches are in flight under a collate_fn too",
        "settle() waits anyway: the thread only loses the overlap, nothing is wrong",
    ),
    Check(
        "a micro-batch is issued without a wait",
        waits.micro_batch_is_asynchronous,
        "two are in flight",
        "the lane does where nvjpeg.decoding_waits(); else something waits for the stream: try copy_to_external with "
        "use_copy_kernel=True in lanes/dali_outputs.py",
    ),
    Check(
        "letting go of DALI's outputs does not wait for the device",
        waits.release_is_asynchronous,
        "nothing to do",
        "the lane's thread stalls for a step: sweep where it is idle, in device/work.py",
    ),
    Check(
        "a CUDA graph can be captured while the lane works",
        waits.capture_beside_the_lane,
        "the advice in minato_gpu/manual/gpus.md is right",
        "it is wrong: see the error; the lane may have to stand still during a capture",
    ),
    Check(
        "inputs of DALI are held for as long as it reads them",
        waits.spoilt_inputs_change_nothing,
        "nothing to do",
        "results are wrong: hold inputs longer, in lanes/dali_inputs.py",
        anywhere=True,
    ),
    Check(
        "what the device has made is fed to DALI in time",
        waits.resident_inputs_are_read_in_time,
        "nothing to do; where issued_early is 0, feeding waits for the stage before: one micro-batch is in flight",
        "DALI reads what lay there before: give feed_input the stream, in lanes/dali_graph.py, or wait for it",
        anywhere=True,
    ),
    Check(
        "building a lane's graphs stops training for less than a tenth of a second",
        waits.opening_stops_nobody,
        "nothing to do",
        "see in which part: a context was there before. Where DALI is imported first, training has begun by then: let "
        "it wait as well, in DeviceLane.await_graphs",
        anywhere=True,
    ),
    Check(
        "feeding DALI stops no other thread for a millisecond",
        waits.feeding_stops_nobody,
        "nothing to do",
        "inputs are still copied under the lock: look for no_copy in lanes/dali_graph.py",
        anywhere=True,
    ),
    Check(
        "a broken JPEG costs no graph",
        questions.broken_costs_no_graph,
        "nothing to do",
        "a GPU's pipeline is lost with its first error: graphs must be built again, off the lock",
        anywhere=True,
    ),
    Check(
        "an error that comes late is told",
        questions.late_errors_are_told,
        "nothing to do",
        "where it was ended by SIGABRT, see said: PyTorch aborts where it frees memory after such an error; else, "
        "without told, batches came that were never made: see DeviceWork._settle; or see what threads_left wait for",
    ),
    Check(
        "memory that PyTorch keeps in its pool is given to DALI",
        questions.pools_are_shared,
        "nothing to do",
        "trim the pools before micro-batches are halved; see short_of_memory and repeated",
    ),
    Check(
        "without a budget a few batches are on the device",
        questions.few_batches,
        "nothing to do",
        "more than the default lies there: see device_bytes_peak and batch_bytes, and memory/device_budget.py",
    ),
    Check(
        "the device lane's thread stops training for less than a millisecond",
        waits.pauses_are_short,
        "nothing to do",
        "see which part by py-spy --gil; draws can move to workers, or the lane to a process of its own",
        anywhere=True,
    ),
)


def checks(request: Request) -> Iterator[Row]:
    """A row for each: ``holds`` and what that ``means``, or why it is ``missing``, or its ``error``. What an earlier
    command has answered is not asked again."""
    for check in CHECKS:
        if request.row("checks", check.name) is None:
            yield _row(request, check)


def _row(request: Request, check: Check) -> Row:
    row: Row = {"name": check.name}
    if request.settings.device != "cuda" and not check.anywhere:
        return {**row, "missing": "a GPU is needed to ask"}
    if not request.time_for(_USUAL_S):
        return {**row, "missing": NO_TIME}
    try:
        holds, figures = request.isolated(_EACH_S, check.ask, request.settings)
    except MeasurementError as error:
        progress(f"{check.name} could not be asked:\n{error}")
        return {**row, "error": excerpt(str(error))}
    means = check.if_so if holds else check.if_not
    progress(f"{check.name}: {'yes' if holds else 'NO'}; {means} {figures}")
    return {**row, "holds": holds, "means": means, **figures}
