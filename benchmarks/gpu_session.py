"""What a GPU machine is needed for, in one go: ``python -m benchmarks.gpu_session``.

Parts run one after another, what is most worth knowing first, each in a process of its own. Each row is written when it
is known (``NAME.rows.jsonl`` beside the document): a part that dies, or a machine that goes away, costs no other.

    probe    = which way of decoding JPEGs works here, is right beside other work, and is fastest; the others use it
    first    = the GPU tests of the device lane
    tune     = settings of every peer and of this loader, each tried for as long as the others
    rates    = photographs, decoded, cropped, normalised, without a step: all-CPU, all-device, hybrid, peers; samples/s
    training = the same with a step of ResNet-50; step_s on the device, and resident_step_s on batches that lay there
    cores    = one run each on 4 and on 8 cores, which a server of eight GPUs has for each of them
    tests    = all other GPU tests, file by file
    checks   = questions with two answers, and what each means for the project (``session/checks.py``)
    parity   = every stage of every pipeline: do its CPU and its device implementation mean the same?
    memory   = the device's memory that a loader takes, without and with a budget
    price    = the step against the share of time that the device lane works
    light    = training with small photographs, for which the CPU lane should suffice
    thread   = what ``next`` takes of the training thread when its batch lies ready, and for how long the interpreter is
               taken from it while it computes

``--seconds`` is for all of that, this program's own start included: what a part leaves goes to those after it, and none
is begun without time for it. ``--resume FILE`` goes on with what an earlier command has left, as does an ``--out`` that
is there: parts that are complete are not run again, unless ``--part`` names them. ``targets`` in the document says what
was to be reached and what was. The photographs are made once, in ``--data``. Without a GPU the same code runs against
the CPU stand-ins, which shows that it works; its figures mean nothing.
"""

from __future__ import annotations

import gc
import importlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, time
from typing import Any

import click
import psutil
import torch

from benchmarks import report
from benchmarks.isolate import MeasurementError, excerpt, isolated
from benchmarks.report import progress
from benchmarks.session import checks, gpu_tests, harm, parts, probe
from benchmarks.session.record import NO_TIME, Record, Row, Rows, lines_beside, unanswered
from benchmarks.session.settings import LEAST_S, Request, Settings, default_path, described, differences
from minato_gpu import parity
from minato_gpu.lab.demo.photographs import make
from pipelines import image_classification

MODULES = ("image_classification", "segmentation_3d", "object_detection", "speech_recognition")
_COLUMNS = (
    *("case", "name", "passed", "holds", "way", "samples_per_s", "samples_per_s_spread", "cores_busy"),
    *("device_share", "gpu_busy", "jpeg_engine_busy", "gpu_bytes", "device_bytes_peak"),
    *("step_s", "step_p99_s", "step_slowdown", "step_s_per_device_s", "next_p99_s", "pause_p99_s"),
    *("max_levels", "content_ok", "rough", "missing", "error"),
)
_TARGET_COLUMNS = ("name", "case", "measured", "relation", "target", "met", "best_peer", "bottleneck", "why")
_LINE = 100  # characters of an error in a table


@dataclass(frozen=True)
class Part:
    """``share_s``: seconds that it is worth; it gets more where all have more. ``least_s``: not begun without them."""

    run: Callable[[Request], Iterator[Row]]
    share_s: float
    least_s: float = 15.0


def check(request: Request) -> Iterator[Row]:
    """Every stage of every pipeline, on its module's example data. One that cannot be checked hides no other."""
    for module in MODULES[: 1 if request.settings.quick else None]:
        if request.row("parity", module) is None:
            yield _checked(request, module)


def _checked(request: Request, module: str) -> Row:
    if not request.time_for(LEAST_S):
        return {"name": module, "missing": NO_TIME}
    try:
        found = request.isolated(150.0, parity.run_check, f"pipelines.{module}", None, request.settings.device)
    except MeasurementError as error:
        progress(f"parity of {module} failed:\n{error}")
        return {"name": module, "passed": False, "error": excerpt(str(error))}
    worst = [row["stage"] for row in found.rows if not row["passed"]]
    return {"name": module, "passed": found.passed, "stages_failed": worst, "rows": found.rows}


PARTS: dict[str, Part] = {
    "probe": Part(probe.probe, 60.0),
    "first": Part(gpu_tests.first, 40.0),
    "tune": Part(parts.tune, 100.0, 30.0),
    "rates": Part(parts.rates, 120.0, 30.0),
    "training": Part(parts.training, 110.0, 30.0),
    "cores": Part(parts.cores, 70.0, 30.0),
    "tests": Part(gpu_tests.tests, 100.0),
    "checks": Part(checks.checks, 100.0),
    "parity": Part(check, 60.0),
    "memory": Part(parts.memory, 45.0, 30.0),
    "price": Part(harm.price, 60.0, 40.0),
    "light": Part(parts.light, 70.0, 30.0),
    "thread": Part(harm.thread, 60.0, 30.0),
}
"""In the order in which they run: what must not be wrong, the figures that claims stand on, the rest."""

USUAL_S = 1800.0
PHOTOGRAPHS_S = 50.0
_UNWIND_S = 5.0  # a part that is asked to end


# --- the session -------------------------------------------------------------------------------------------------


def session(settings: Settings, names: Sequence[str], record: Record, end: float) -> Row:
    """Run the parts until ``end`` (by ``perf_counter``); the document is whole after each. A part that fails, takes too
    long, or is not begun, is a row."""
    for number, name in enumerate(names):
        left, rows = end - perf_counter(), record.rows(list(PARTS))
        probe.decide(rows)
        if left < PARTS[name].least_s and not settings.quick:
            progress(f"{name}: {NO_TIME}")
            record.add({"part": name, "complete": False, "missing": NO_TIME})
            continue
        began = perf_counter()
        ended = _part(name, settings, rows, record, share_of(names[number:], left))
        progress(f"{name}: {perf_counter() - began:.0f} s")
        record.add({"part": name, **ended, "seconds": perf_counter() - began})
        record.write(list(PARTS))
    return record.write(list(PARTS))


def share_of(names: Sequence[str], left_s: float) -> float:
    """Seconds for the first of the parts that are left: what it is worth, and more where there is more for all."""
    share, total = PARTS[names[0]].share_s, sum(PARTS[name].share_s for name in names)
    return min(left_s, share * max(1.0, left_s / total))


def _part(name: str, settings: Settings, rows: Rows, record: Record, limit_s: float) -> Row:
    """Run a part, which adds its rows: whether it is ``complete``, and its ``error``."""
    known = len(record.lines())
    try:
        isolated(
            _within,
            name,
            settings,
            rows,
            record,
            limit_s - _UNWIND_S,
            timeout_s=limit_s,
            settle_s=settings.settle_s,
            grace_s=_UNWIND_S,
            quiet=False,
        )
    except MeasurementError as error:
        progress(f"{name} failed:\n{error}")
        return {"complete": False, "error": excerpt(str(error))}
    return {"complete": not unanswered(record.lines()[known:])}


def _within(name: str, settings: Settings, rows: Rows, record: Record, limit_s: float) -> None:
    """A part, in its process. Asked to end, it unwinds, so that no measurement of its own is left running."""
    report.end_in_order()
    for row in PARTS[name].run(Request(settings, rows, perf_counter() + limit_s)):
        record.add({"case": name, **row})


def _photographs(folder: Path, count: int) -> None:
    """Make them, or find them made; toys where none are counted."""
    if count:
        make(folder, count, 0)
    elif not folder.exists():
        image_classification.example_data(folder)


def _preload(device: str) -> None:
    """Import once what every run would import for itself, as far as that does not ask CUDA.

    An optimizer imports SymPy, which takes a second.
    """
    names = ["sympy"]
    if device == "cpu":
        names += ["torch._dynamo", "nvidia.dali.fn", "nvidia.dali.plugin.pytorch", "spdl.pipeline"]
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # every fork looks for garbage before it begins: not among all that


def _usual_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _begun(resume: Path | None, out: Path | None, settings: Settings, about: Mapping[str, Any]) -> Record:
    """The record to add to, with what an earlier command knew: ``resume``, or what is at ``out`` already."""
    target = out or resume or default_path(settings, about)
    source = resume or target
    if resume is None and not (target.exists() or lines_beside(target).exists()):
        return Record.begin(target, about)
    try:
        known = Record.read(source)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    unlike = differences(known.about, about)
    if unlike:
        raise click.UsageError(f"{source} was measured otherwise: {', '.join(unlike)} differ; name another --out")
    return Record.begin(out or known.path, about, known)


def _failed(row: Row, wanted: Sequence[str]) -> bool:
    """Whether a part of this command did not end, or has found the project to be wrong. That a contender, or a way of
    decoding, does not work here is a finding like others."""
    wrong = row["case"] in ("first", "tests", "parity") and row.get("passed") is False
    return row["case"] in wanted and (wrong or (row["name"] == row["case"] and "error" in row))


def _short_lines(rows: Rows) -> Rows:
    """The rows for a table, with one line of each error."""
    return [{**row, "error": _last_line(row["error"])} if "error" in row else row for row in rows]


def _last_line(error: object) -> str:
    return str(error).strip().splitlines()[-1][:_LINE] if str(error).strip() else ""


@click.command(help=__doc__)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="The GPU where there is one, if not given.")
@click.option("--part", "names", multiple=True, type=click.Choice(list(PARTS)), help="Only this part; repeatable.")
@click.option("--seconds", type=click.FloatRange(min=1.0), default=USUAL_S, help="For all of it; half an hour.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Where the document goes.")
@click.option("--resume", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="An earlier document.")
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Where the photographs are, or go.")
@click.option("--commit", help="What is measured; must be given on a GPU.")
@click.option("--quick", is_flag=True, help="Toy size: shows that it works; the figures mean nothing.")
def main(
    device: str | None,
    names: tuple[str, ...],
    seconds: float,
    out: Path | None,
    resume: Path | None,
    data: Path | None,
    commit: str | None,
    quick: bool,
) -> None:
    """See the module's head."""
    end = perf_counter() + seconds - (time() - psutil.Process().create_time())
    report.end_in_order()
    device = device or isolated(_usual_device, settle_s=0.0)  # who asks CUDA can fork no more
    if device == "cuda" and commit is None:
        raise click.UsageError("--commit must be given on a GPU: figures of an unknown commit are worth nothing")
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="minato_gpu_session_")) if quick else None
        folder = data or Path(scratch or tempfile.gettempdir()) / "minato_gpu_session_photographs"
        settings = Settings.usual(device, folder, quick=quick)
        record = _begun(resume, out, settings, isolated(described, settings, commit, settle_s=0.0))
        isolated(_photographs, folder, settings.photographs, timeout_s=PHOTOGRAPHS_S, settle_s=0.0)
        _preload(device)
        wanted = [name for name in PARTS if (name in names if names else name not in record.complete())]
        content = session(settings, wanted, record, end)
    report.print_table("gpu session", _short_lines(content["rows"]), _COLUMNS)
    report.print_table("targets", content["targets"], _TARGET_COLUMNS)
    progress(f"written to {record.path}")
    if any(_failed(row, wanted) for row in content["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
