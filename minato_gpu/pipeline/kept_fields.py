"""The fields of a pipeline that depend on no draw, and runs that make these fields or begin with them.

Found by dataflow, field by field. A stage is *fixed* if it draws nothing and reads nothing that depends on a draw; what
it writes is the same in every epoch. Of a stage that is not, a part may be (``Keepable``). Kept are those of these
fields that other stages read, or that are outputs: with them a run needs no fixed stage at all.

    read > decode > crop (drawn) > normalise        read and decode are fixed; kept is what decode writes

Kept fields belong to what the data set has returned: where that has changed, they are not used (``given``). They also
belong to one pipeline: a loader whose pipeline is replaced starts them anew.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.pipeline.stages import Fields, Keepable
from minato_gpu.samples import Value

Kept = Mapping[int, Fields]
"""Kept fields, by the number of the stage that writes them."""
Copied = Fields | str
"""Copies of fields; or why there are none, in words."""

_LARGEST_GIVEN = 1 << 16  # bytes: a data set that returns more has read it itself, which kept fields would not save
_DREW = "a stage without draw draws from a global generator"
_COMPARED = 32  # samples for which a stage is run both ways, to know what its part would save


class PreparedSample(NamedTuple):
    """A sample that was prepared so that its fields can be kept."""

    outputs: Fields
    kept: Kept | None  # copies; None where a field cannot be kept
    saved_s: float  # seconds that kept fields save
    prepare_s: float  # seconds that preparing the sample took in all
    why_not: str = ""  # why nothing is kept, in words; "" otherwise


class KeepableFields:
    """The fields of one pipeline that a cache may keep. False if there are none."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._fixed: set[int] = set()
        self._parts: dict[int, Keepable] = {}
        self._names: dict[int, tuple[str, ...]] = {}  # what is kept of fixed stages
        self._given: tuple[str, ...] = ()  # fields of the data set that fixed stages read
        self._compared = 0
        self._fused_s = self._made_s = 0.0
        self._look()

    def __bool__(self) -> bool:
        return bool(self._names or self._parts)

    def _look(self) -> None:
        writer: dict[str, int] = {}  # stage that last wrote each field; fields of the data set alone are not in it
        wanted: dict[int, set[str]] = {}
        given: set[str] = set()

        def fixed(names: Iterable[str]) -> bool:
            return all(name not in writer or writer[name] in self._fixed for name in names)

        def want(names: Iterable[str]) -> None:
            for name in names:
                if writer.get(name) in self._fixed:
                    wanted.setdefault(writer[name], set()).add(name)

        for number, stage in enumerate(self._pipeline.stages):
            early: tuple[str, ...] = ()  # fields read only to make what may be kept
            if stage.draw is None and fixed(stage.reads):
                self._fixed.add(number)
                early = stage.reads
            elif stage.keep is not None and fixed(stage.keep.reads):
                self._parts[number] = stage.keep
                early = stage.keep.reads
            given.update(name for name in early if name not in writer)
            want({*stage.reads}.difference(early).union(stage.meta))  # these are read where kept fields are used, too
            writer.update(dict.fromkeys(stage.writes, number))
        want(self._pipeline.outputs)
        self._names = {number: tuple(sorted(names)) for number, names in wanted.items()}
        self._given = tuple(sorted(given))

    # --- runs ------------------------------------------------------------------------------------------------

    def given(self, fields: Fields) -> bytes | None:
        """Returns what the data set gave to fixed stages, as bytes to compare; None if that is too much or cannot be
        pickled."""
        try:
            data = pickle.dumps([fields[name] for name in self._given], 5)
        except Exception:  # a field that is missing, or cannot be pickled: the run will say so, or nothing is kept
            return None
        return data if len(data) <= _LARGEST_GIVEN else None

    def run(self, fields: Fields, kept: Kept, seed: int, before_stage: Callable[[int], None]) -> Fields:
        """Returns the sample's outputs as ``Pipeline.run`` does, from the fields that ``make`` has kept of a sample
        with the same ``given``."""
        pipeline = self._pipeline
        known = dict(pipeline.check_given(fields))
        for number in range(len(pipeline.stages)):
            if number in self._fixed:
                known.update(kept.get(number, {}))
                continue
            before_stage(number)
            part = self._parts.get(number)
            if part is None:
                known.update(pipeline.run_stage(number, known, seed))
            else:
                known.update(pipeline.run_stage(number, {**known, **kept[number]}, seed, part.cpu))
        return {name: known[name] for name in pipeline.outputs}

    def make(
        self,
        fields: Fields,
        seed: int,
        before_stage: Callable[[int], None],
        drew: Callable[[], bool] = lambda: False,
    ) -> PreparedSample:
        """Prepares the sample and copies its fields that can be kept.

        ``drew`` returns whether a global generator has been drawn from since ``before_stage``: then nothing of the
        sample is kept.
        """
        pipeline, kept = self._pipeline, dict[int, Copied]()
        begin, saved_s, more_s = perf_counter(), 0.0, 0.0
        known = dict(pipeline.check_given(fields))
        for number in range(len(pipeline.stages)):
            before_stage(number)
            began = perf_counter()
            if number in self._parts:
                known, kept[number], saves, costs = self._in_two(number, known, seed, before_stage, drew)
                saved_s += saves
                more_s += costs
                continue
            written = pipeline.run_stage(number, known, seed)
            known.update(written)
            if number in self._fixed:
                after = perf_counter()
                saved_s += after - began
                names = self._names.get(number, ())
                kept[number] = _DREW if drew() else _copied({name: written[name] for name in names})
                more_s += perf_counter() - after
        prepare_s = perf_counter() - begin - more_s
        outputs = {name: known[name] for name in pipeline.outputs}
        if why_not := next((each for each in kept.values() if isinstance(each, str)), ""):
            return PreparedSample(outputs, None, saved_s, prepare_s, why_not)
        whole = {number: each for number, each in kept.items() if each and not isinstance(each, str)}
        return PreparedSample(outputs, whole, saved_s, prepare_s)

    def _in_two(
        self,
        number: int,
        known: dict[str, Value],
        seed: int,
        before_stage: Callable[[int], None],
        drew: Callable[[], bool],
    ) -> tuple[dict[str, Value], Copied, float, float]:
        """Runs a stage of which a part is kept (``Stage.keep``) in two steps.

        Returns the fields after it, the part, the seconds that the part saves, and the seconds that two steps take more
        than one.
        """
        run, part, began = self._pipeline.run_stage, self._parts[number], perf_counter()
        fused_s = _timed(lambda: run(number, known, seed))[1] if self._compared < _COMPARED else 0.0
        before_stage(number)
        made, made_s = _timed(lambda: run(number, known, seed, lambda fields, _: part.make(fields), part.writes))
        kept = _DREW if drew() else _copied(made)
        before_stage(number)
        written, rest_s = _timed(lambda: run(number, {**known, **made}, seed, part.cpu))
        if fused_s:  # the first samples go both ways
            self._compared += 1
            self._fused_s += fused_s
            self._made_s += made_s
        usual_s = self._fused_s / max(self._made_s, 1e-9) * made_s
        return {**known, **written}, kept, max(0.0, usual_s - rest_s), perf_counter() - began - usual_s


def _timed(run: Callable[[], Fields]) -> tuple[Fields, float]:
    """Returns what a function returns, and the seconds that it took."""
    began = perf_counter()
    return run(), perf_counter() - began


def _copied(fields: Fields) -> Copied:
    """Returns copies that a later stage which works in place does not change; or why there are none, in words."""
    copies: dict[str, Value] = {}
    for name, value in fields.items():
        try:
            copies[name] = _copy(value)
        except Exception as error:  # runs the values' own code: no error of the sample's
            return f"the field {name!r} cannot be kept: {error}"
    return copies


def _copy(value: Value) -> Value:
    """Returns a writable copy, with memory of its own, of an array or a tensor, also of those in dicts and lists.

    Raises TypeError for arrays and tensors of a subclass, of objects, on a device, or that require grad. Objects of
    other classes are copied as their own code does it, with the arrays in them.
    """
    kind = type(value)
    if kind is dict:
        return {key: _copy(each) for key, each in value.items()}
    if kind in (list, tuple):
        return kind(map(_copy, value))
    if isinstance(value, np.ndarray):
        if kind in (np.ndarray, np.memmap) and not value.dtype.hasobject:
            return np.array(value, order="A", subok=False)
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__} of {value.dtype}")
    if isinstance(value, torch.Tensor):
        if kind is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
            grad = " that requires grad" if value.requires_grad else ""
            raise TypeError(f"a {kind.__module__}.{kind.__qualname__} on {value.device}{grad}")
        if value.layout is torch.strided and not (value.is_quantized or value.is_nested):
            return value.clone().resolve_conj().resolve_neg()
    return copy.deepcopy(value)
