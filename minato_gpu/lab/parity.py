"""Checks that both implementations of every stage mean the same (promise P2 across lanes).

Each stage that has a device implementation gets, from the CPU, the same fields and the same drawn parameters for
both implementations; then the whole device part is compared for every split point. Deviations are in levels: one
level is 1/255 of the picture's range (``Field.level``). A stage passes if no value of any sample deviates by more
than its ``tolerance``'s maximum and no sample's mean absolute deviation is above the tolerance's mean. The worst
sample decides, not the average one, because routing by cost would turn an error that only large pictures have into
a bias by size.

Before that the dtype and the shape must be the same. Text, bytes and numbers in fields of dtype object must be equal,
and arrays there are compared as elsewhere; of other objects nothing is said. The CPU gets copies, so that what it
changes of its input in place shows where the field is looked at: in a later stage, or among the outputs.
"""

from __future__ import annotations

import copy
import importlib
import reprlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from numbers import Number
from operator import add
from types import ModuleType
from typing import Any

import numpy as np

from minato_gpu.device.executor import DeviceExecutor
from minato_gpu.device.values import to_numpy
from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.pipeline.stages import Field, Fields, Tolerance
from minato_gpu.pipeline.undeclared_writes import UndeclaredWrites, suggest_writes
from minato_gpu.samples import JSON, StageError, Value, sample_seed
from minato_gpu.util.messages import from_extra

MAX_BATCH = 16
DRAWS = 2  # how often run_check prepares each sample, each time with other drawn parameters
MAX_SAMPLES = 200  # of the user's own data, spread evenly over it
_COMPARED = (str, bytes, Number)  # of objects


@dataclass
class StageParity:
    """The comparison of one stage, or of everything from a split point on."""

    stage: str  # its name; "split K": everything from split point K on
    implementation: str  # such as "dali on cpu"
    samples: int = 0
    max_deviation: float = 0.0  # of the worst sample, in levels; infinite where ``problem`` says why
    mean_deviation: float = 0.0  # likewise: the largest of the samples' mean deviations
    limit_max: float = 0.0
    limit_mean: float = 0.0
    problem: str = ""  # dtypes, shapes or values that are no numbers differ, or the device implementation failed

    @property
    def passed(self) -> bool:
        return self.max_deviation <= self.limit_max and self.mean_deviation <= self.limit_mean

    def add(self, expected: Fields, got: Mapping[str, JSON] | StageError, declared: Mapping[str, Field]) -> None:
        """Adds a sample: what the CPU (``expected``) and the device have made of it; ``got`` is the device's fields, or
        its error. ``declared``: the fields as the pipeline declares them."""
        self.samples += 1
        if isinstance(got, StageError):
            return self._fail(str(got))
        for name, reference in expected.items():
            if declared[name].dtype == np.dtype(object):
                self._add_object(name, reference, got[name])
            else:
                self._add_array(name, np.asarray(reference), to_numpy(got[name]), declared[name].level)
        return None

    def _add_object(self, name: str, reference: Value, value: Value) -> None:
        if isinstance(reference, np.ndarray) and isinstance(value, np.ndarray) and reference.dtype != object:
            return self._add_array(name, reference, value, 1.0)
        reference, value = _plain(reference), _plain(value)
        if isinstance(reference, _COMPARED) and isinstance(value, _COMPARED) and not _same(value, reference):
            self._fail(f"field {name!r} is {reprlib.repr(value)}, on the CPU {reprlib.repr(reference)}")
        return None

    def _add_array(self, name: str, reference: Value, value: Value, level: float) -> None:
        for what in ("dtype", "shape"):
            here, there = getattr(value, what), getattr(reference, what)
            if here != there:
                return self._fail(f"field {name!r} has {what} {here}, on the CPU {there}")
        if value.size:
            deviation = _deviation(value, reference) / level
            self.max_deviation = max(self.max_deviation, float(deviation.max()))
            self.mean_deviation = max(self.mean_deviation, float(deviation.mean()))
        return None

    def _fail(self, problem: str) -> None:
        self.max_deviation = self.mean_deviation = float("inf")
        self.problem = self.problem or problem


@dataclass(frozen=True)
class ParityReport:
    """The result of a comparison."""

    rows: list[dict[str, JSON]]  # flat: the fields of StageParity, and ``passed``
    skipped: list[str]  # broken samples that were left out, as the CPU reports them

    @property
    def passed(self) -> bool:
        """True if something was compared, and all of it passed."""
        return bool(self.rows) and all(row["passed"] for row in self.rows)


def run_check(module_name: str, data_dir: str | None = None, device: str = "cpu") -> ParityReport:
    """Checks the pipeline of a definition module (see ``pipelines/__init__.py`` for what that is).

    ``data_dir``: the data to compare on; None for the module's own example data, in a folder that is deleted again. At
    most MAX_SAMPLES samples are used. Samples that the CPU cannot prepare are skipped and listed. Raises ImportError or
    AttributeError where the module is not what it should be, and ValueError where its pipeline has no device
    implementation or no sample is usable.
    """
    module = importlib.import_module(module_name)
    with tempfile.TemporaryDirectory(prefix="minato_gpu_check_") as directory:
        if data_dir is None:
            _member(module, "example_data")(directory)
        data = _member(module, "dataset")(data_dir or directory)
        return check_data(_pipeline(module, data), data, device)


def _member(module: ModuleType, name: str) -> Any:
    found = getattr(module, name, None)
    if not callable(found):
        raise AttributeError(f"{module.__name__} has no function {name}(); see help('minato_gpu.pipelines')")
    return found


def check_data(pipeline: Pipeline, data: Value, device: str = "cpu") -> ParityReport:
    """Checks a pipeline on the items of a map-style data set, as ``run_check`` does."""
    chosen = sorted({int(n) for n in np.linspace(0, len(data) - 1, min(len(data), MAX_SAMPLES))})
    usable: list[Fields] = []
    skipped: list[str] = []
    for index in chosen:
        sample = data[index]
        try:
            pipeline.run(copy.deepcopy(sample), sample_seed(0, 0, index))
        except StageError as error:
            skipped.append(f"{error.origin}: {error}")
        else:
            usable.append(sample)
    if skipped and not usable:
        raise ValueError(f"there is no usable sample to compare on; the first of {len(chosen)}: {skipped[0]}")
    results = check(pipeline, usable, device=device, draws=DRAWS)
    return ParityReport([{**asdict(result), "passed": result.passed} for result in results], skipped)


def _pipeline(module: ModuleType, data: Value) -> Pipeline:
    """Returns the module's pipeline.

    Raises ValueError, which shows what to declare, if a stage does not declare what it writes.
    """
    try:
        pipeline: Pipeline = _member(module, "pipeline")()
    except UndeclaredWrites as error:
        samples = [data[index] for index in range(min(len(data), MAX_BATCH))]
        suggested = suggest_writes(error.stages, samples)
        raise ValueError(
            f"these stages do not declare what they write; of the first {len(samples)} samples they wrote (None: a "
            f"size that differs; check that the others never do):\n{suggested}"
        ) from error
    return pipeline


def check(pipeline: Pipeline, samples: Sequence[Fields], *, device: str = "cpu", draws: int = 1) -> list[StageParity]:
    """Compares every device implementation of ``pipeline``, then every split, on ``samples`` (the data set's items).

    ``draws``: how many times each sample is prepared, with other parameters each time. Raises StageError where the CPU
    cannot prepare a sample or a stage's ``features`` fail, ImportError where a device implementation's library is
    missing, and ValueError where there is nothing to compare.
    """
    if not samples:
        raise ValueError("there is no usable sample to compare on")
    if all(stage.device is None for stage in pipeline.stages):
        raise ValueError(f"pipeline {pipeline.name!r} has no stage with a device implementation")
    seeded = [(fields, sample_seed(0, epoch, n)) for n, fields in enumerate(samples) for epoch in range(draws)]
    if pipeline.feature_names:
        for fields, seed in seeded:
            pipeline.features(pipeline.run(copy.deepcopy(fields), seed, stop=pipeline.host_prefix))
    none = Tolerance()
    compared = [
        (stage.name, range(number, number + 1), stage.tolerance.get(_kind(device), none))
        for number, stage in enumerate(pipeline.stages)
        if stage.device is not None
    ]
    compared += [
        (f"split {split}", range(split, len(pipeline.stages)), whole_tolerance(pipeline, device, split))
        for split in pipeline.splits[:-1]
    ]
    found = []
    for name, stages, limit in compared:
        kinds = sorted({how.kind for number in stages if (how := pipeline.stages[number].device) is not None})
        implementation = f"{'+'.join(kinds)} on {device}"
        found.append(StageParity(name, implementation, limit_max=limit.maximum, limit_mean=limit.mean))
        _compare(pipeline, stages, seeded, device, found[-1])
    return found


def whole_tolerance(pipeline: Pipeline, device: str, split: int) -> Tolerance:
    """Returns how far outputs may be from the CPU's, in levels, if the stages from ``split`` on run on ``device``.

    That is what the pipeline declares, or the sum of its stages' limits.
    """
    if _kind(device) in pipeline.tolerance:
        return pipeline.tolerance[_kind(device)]
    limits = (stage.tolerance.get(_kind(device), Tolerance()) for stage in pipeline.stages[split:])
    return reduce(add, limits, Tolerance())


def _kind(device: str) -> str:
    return device.partition(":")[0]


def _plain(value: Value) -> Value:
    """Returns a NumPy scalar, or an array of shape (), as a Python number."""
    return value.item() if isinstance(value, (np.ndarray, np.generic)) and not value.shape else value


def _same(value: Value, reference: Value) -> Value:
    """Returns where two arrays are equal, or both NaN (or NaT)."""
    return (value == reference) | ((value != value) & (reference != reference))


def _deviation(value: Value, reference: Value) -> Value:
    """Returns the distance of two arrays of one dtype for each element: exactly 0 where they are equal, and nowhere
    else; infinite where one of them is NaN."""
    kind = reference.dtype.kind
    if kind == "c":
        return np.hypot(_deviation(value.real, reference.real), _deviation(value.imag, reference.imag))
    if kind in "biu":
        # Modulo 2**64 the difference of any two integers is right; float64 would round them first.
        large, small = np.maximum(value, reference), np.minimum(value, reference)
        return (large.astype(np.uint64) - small.astype(np.uint64)).astype(np.float64)
    if kind == "f":
        with np.errstate(invalid="ignore"):  # of infinities
            apart = np.abs(value.astype(np.float64) - reference.astype(np.float64))
        return np.where(_same(value, reference), 0.0, np.where(np.isnan(apart), np.inf, apart))
    return np.where(_same(value, reference), 0.0, np.inf)


def _compare(
    pipeline: Pipeline, stages: range, seeded: Sequence[tuple[Fields, int]], device: str, into: StageParity
) -> None:
    executor = DeviceExecutor(pipeline, stages.start, stages.stop, device=device, max_batch=MAX_BATCH)
    declared = pipeline.fields_at(stages.stop)
    try:
        with from_extra("cuda13", "cuda12"):
            executor.load()
        for first in range(0, len(seeded), MAX_BATCH):
            batch = seeded[first : first + MAX_BATCH]
            items = [(pipeline.run(copy.deepcopy(fields), seed, 0, stages.start), seed) for fields, seed in batch]
            copies = [copy.deepcopy(fields) for fields, _ in items]
            for fields, (_, seed), got in zip(copies, items, executor.run(items), strict=True):
                known = pipeline.run(fields, seed, stages.start, stages.stop)
                into.add({name: known[name] for name in executor.makes}, got, declared)
    finally:
        executor.close()
