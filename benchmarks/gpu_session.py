"""What a GPU machine is needed for, in one go: ``python -m benchmarks.gpu_session``.

Parts run one after another, what is most worth knowing first, each measurement in a process of its own. The document is
written whenever a row is known: a measurement that dies, or a machine that goes away, costs no other.

    probe    = which way of decoding JPEGs works here, is right beside other work, and is fastest; the others use it
    tests    = the tests that need a GPU, file by file, the device lane's first
    rates    = photographs, decoded, cropped, normalised, without a step: all-CPU, all-device, hybrid, peers; samples/s
    training = the same with a step of ResNet-50; step_s on the device, and resident_step_s on batches that lay there
    parity   = every stage of every pipeline: do its CPU and its device implementation mean the same?
    memory   = the device's memory that a loader takes, without and with a budget

``--seconds`` is for all of that, this program's own start included: what a part leaves goes to those after it, and none
begins what it has no time for. An ``--out`` that is there is gone on with: parts that are complete are not run again,
unless ``--part`` names them. The photographs are made once, in ``--data``. Without a GPU the same code runs against the
CPU stand-ins, which shows that it works; its figures mean nothing.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from time import perf_counter, time
from typing import Any

import click
import psutil
import torch

from benchmarks import report
from benchmarks.isolate import excerpt, isolated
from benchmarks.report import progress
from benchmarks.session import gpu_tests, parts, probe
from benchmarks.session.settings import NO_TIME, Request, Row, Settings, described
from minato_gpu.lab.demo.photographs import make
from minato_gpu.lab.report import write
from pipelines import image_classification

PARTS: dict[str, tuple[Callable[[Request], Iterator[Row]], float]] = {
    "probe": (probe.probe, 60.0),
    "tests": (gpu_tests.tests, 150.0),
    "rates": (parts.rates, 150.0),
    "training": (parts.training, 150.0),
    "parity": (parts.check, 60.0),
    "memory": (parts.memory, 60.0),
}
"""In the order in which they run; with the seconds that each is worth: it gets more where all have more."""

_COLUMNS = (
    *("case", "name", "passed", "way", "samples_per_s", "samples_per_s_spread", "cores_busy"),
    *("device_share", "gpu_busy", "jpeg_engine_busy", "device_bytes_peak"),
    *("step_s", "step_p99_s", "step_slowdown"),
    *("max_levels", "content_ok", "rough", "missing", "error"),
)
_LINE = 100  # characters of an error in a table
_PHOTOGRAPHS_S = 50.0
_FIGURE = "samples_per_s"


class Record:
    """The document, written whenever a row comes."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """Goes on with the document at ``path`` where there is one; one that was measured otherwise is refused."""
        self.path = path
        self.content: Row = {"complete": [], **about}
        if path.exists():
            known = json.loads(path.read_text(encoding="utf-8"))
            ours, theirs = ({**each["settings"], "gpus": each["machine"]["gpus"]} for each in (about, known))
            unlike = sorted(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
            if unlike:
                raise click.UsageError(f"{path} was measured otherwise: {', '.join(unlike)} differ; name another --out")
            self.content = {"complete": [], **known}

    @property
    def rows(self) -> list[Row]:
        found: list[Row] = self.content["rows"]
        return found

    def add(self, row: Row) -> None:
        """Put it in the place of an earlier row of its case and name. One that has no figures does not take the place
        of one that has."""
        rows = {(each["case"], each["name"]): each for each in self.rows}
        key = row["case"], row["name"]
        if _FIGURE in row or not (row.keys() & {"missing", "error"} and _FIGURE in rows.get(key, ())):
            rows[key] = row
        rank = {case: number for number, case in enumerate(PARTS)}
        self.content["rows"] = sorted(rows.values(), key=lambda each: rank.get(each["case"], len(rank)))
        self.write()

    def write(self) -> None:
        write(self.content, self.path)


def session(settings: Settings, names: Sequence[str], record: Record, end: float) -> None:
    """Run the parts until ``end`` (by ``perf_counter``). What had no time, or failed, is a row."""
    for number, name in enumerate(names):
        probe.decide(record.rows)
        began, complete = perf_counter(), True
        request = Request(settings, record.rows, began + share_of(names[number:], end - began))
        try:
            for row in PARTS[name][0](request):
                complete &= row.get("missing") != NO_TIME
                record.add({"case": name, **row})
        except Exception:
            complete, error = False, excerpt(traceback.format_exc())
            progress(f"{name} failed:\n{error}")
            record.add({"case": name, "name": name, "error": error})
        ended = {each for each in record.content["complete"] if each != name} | ({name} if complete else set())
        record.content["complete"] = sorted(ended)
        record.write()
        progress(f"{name}: {perf_counter() - began:.0f} s")


def share_of(names: Sequence[str], left_s: float) -> float:
    """Seconds for the first of the parts that are left: what it is worth, and more where there is more for all."""
    share, total = PARTS[names[0]][1], sum(PARTS[name][1] for name in names)
    return min(left_s, share * max(1.0, left_s / total))


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


def failed(row: Row, wanted: Sequence[str]) -> bool:
    """Whether a part of this command failed as a whole, or has found the project to be wrong. That a contender, or a
    way of decoding, does not work here is a finding like others."""
    wrong = row["case"] in ("tests", "parity") and (row.get("passed") is False or "error" in row)
    return row["case"] in wanted and (wrong or (row["name"] == row["case"] and "error" in row))


def _last_line(error: object) -> str:
    return str(error).strip().splitlines()[-1][:_LINE] if str(error).strip() else ""


@click.command(help=__doc__)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="The GPU where there is one, if not given.")
@click.option("--part", "names", multiple=True, type=click.Choice(list(PARTS)), help="Only this part; repeatable.")
@click.option("--seconds", type=click.FloatRange(min=1.0), default=1800.0, help="For all of it; half an hour.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="The document; else gpu_session.json in $OUT."
)
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), help="Where the photographs are, or go.")
@click.option("--commit", help="What is measured; must be given on a GPU.")
@report.quick_option
def main(
    device: str | None,
    names: tuple[str, ...],
    seconds: float,
    out: Path | None,
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
        # Not in the tree, which is measured, and which may be a copy that is thrown away.
        path = out or Path(os.environ.get("OUT") or scratch or tempfile.gettempdir()) / "gpu_session.json"
        record = Record(path, isolated(described, settings, commit, settle_s=0.0))
        isolated(_photographs, folder, settings.photographs, timeout_s=_PHOTOGRAPHS_S, settle_s=0.0)
        _preload(device)
        wanted = [name for name in PARTS if (name in names if names else name not in record.content["complete"])]
        session(settings, wanted, record, end)
        shown = [{**row, "error": _last_line(row["error"])} if "error" in row else row for row in record.rows]
        report.print_table("gpu session", shown, _COLUMNS)
        progress(f"written to {path}")
    if any(failed(row, wanted) for row in record.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
