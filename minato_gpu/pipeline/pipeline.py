"""Pipelines: ordered tuples of stages, checked when constructed, and their run on the CPU.

A sample may be split: with split point k (0 to the number of stages), the stages before k run on the CPU and the rest
on the device. ``Pipeline.splits`` lists the legal ones. Pipelines can be pickled (spawned workers get them), and
importing this module imports neither DALI nor CuPy nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from importlib import import_module
from types import MappingProxyType

from minato_gpu.pipeline.stages import (
    CpuFunction,
    CupyFunction,
    DaliFragment,
    Field,
    Fields,
    Keepable,
    Params,
    Stage,
    Tolerance,
    TorchFunction,
    check_tolerance,
    check_values,
    check_written,
    names_in,
    stage_error,
)
from minato_gpu.pipeline.undeclared_writes import UndeclaredWrites
from minato_gpu.samples import Value, add_note
from minato_gpu.util.cached_property import cached_property

__all__ = [
    "CupyFunction",
    "DaliFragment",
    "Field",
    "Keepable",
    "Pipeline",
    "Stage",
    "Tolerance",
    "TorchFunction",
]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The description of how a sample is prepared.

    Args:
        stages: in order.
        outputs: names of the final fields of a sample, in order.
        name: shown in messages.
        inputs: the fields that the data set returns; when None, every field that is used before a stage writes it
            counts as an input of unknown type.
        tolerance: how far the outputs of a device may differ from the CPU's, by type of device ("cpu", "cuda"); where
            not given, the sum of the limits of the stages that run on the device.

    Raises:
        TypeError, ValueError: a definition that cannot work; the text names the stage.
    """

    stages: tuple[Stage, ...]
    _: KW_ONLY
    outputs: tuple[str, ...]
    name: str = "pipeline"
    inputs: Mapping[str, Field] | None = None
    tolerance: Mapping[str, Tolerance] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.stages, Stage):
            raise TypeError(f"stages must be a sequence of Stage objects, got the stage {self.stages.name!r} alone")
        object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "outputs", names_in("outputs", self.outputs))
        if not self.outputs:
            raise ValueError("outputs must name at least one field")
        _check_stages(self.stages)  # first: what follows looks into them
        check_values("inputs", {} if self.inputs is None else self.inputs, Field)
        check_tolerance("tolerance", self.tolerance)
        _check_flow(self.stages, self.input_fields, self.outputs)
        _check_meta(self.stages, self.input_fields, self.host_prefix)

    @classmethod
    def from_torchvision(cls, transform: Value, **options: Value) -> Pipeline:
        """Makes a pipeline of a ``torchvision.transforms.v2`` transform or ``Compose``, with a stage for each
        transform.

        ``options`` are those of ``build`` in ``minato_gpu.pipelines.torchvision_compose``.
        """
        made: Pipeline = import_module("minato_gpu.pipelines.torchvision_compose").build(transform, **options)
        return made

    @cached_property
    def input_fields(self) -> Mapping[str, Field]:
        """The fields that the data set returns, as declared or inferred."""
        return dict.fromkeys(sorted(self.live(0)), Field(object)) if self.inputs is None else dict(self.inputs)

    @cached_property
    def host_prefix(self) -> int:
        """The number of leading stages that run on the host only: the host read."""
        return next((n for n, stage in enumerate(self.stages) if stage.device is not None), len(self.stages))

    @cached_property
    def splits(self) -> tuple[int, ...]:
        """Legal split points: the stages before one run on the CPU, the rest on the device."""
        last_host = max((n for n, stage in enumerate(self.stages) if stage.device is None), default=-1)
        return tuple(range(last_host + 1, len(self.stages) + 1))

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """The split points strictly inside the device part: the CPU runs at least one stage beyond the host read, and a
        device at least one. Empty if a later stage runs on the host only."""
        inner = tuple(split for split in self.splits if self.host_prefix < split < len(self.stages))
        return inner if self.host_prefix in self.splits else ()

    def bytes_at(self, split: int) -> int | None:
        """Returns the most bytes that the stages from ``split`` on need, without objects; None if not known."""
        fields, wanted = self.fields_at(split), self.live(split)
        sizes = [one.max_bytes for name, one in fields.items() if name in wanted and one.dtype != object]
        return None if None in sizes else sum(size or 0 for size in sizes)

    @cached_property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the cost features, as "stage.feature"."""
        return tuple(f"{stage.name}.{name}" for stage in self.stages for name in stage.feature_names)

    def __repr__(self) -> str:
        return f"<Pipeline {self.name}: {' > '.join(s.name for s in self.stages)}; outputs {', '.join(self.outputs)}>"

    def fields_at(self, number: int) -> Mapping[str, Field]:
        """Returns the declared fields that exist before stage ``number`` runs (``len(stages)``: at the end)."""
        known = dict(self.input_fields)
        for stage in self.stages[:number]:
            known.update(stage.writes)
        return MappingProxyType(known)

    def live(self, split: int) -> frozenset[str]:
        """Returns the names of the fields that the stages from ``split`` on, or the outputs, still need.

        What crosses to another lane or process may leave the rest behind ("path" is worth taking for errors).
        """
        needed = set(self.outputs)
        for stage in reversed(self.stages[split:]):
            needed -= stage.writes.keys()
            needed.update(stage.reads, stage.meta)
        return frozenset(needed)

    def written(self, stages: range) -> tuple[str, ...]:
        """Returns the names of the fields that these stages write."""
        return tuple(dict.fromkeys(name for number in stages for name in self.stages[number].writes))

    def taken(self, stages: range) -> tuple[str, ...]:
        """Returns the names of the fields that these stages read and none of them has written."""
        found: dict[str, None] = {}
        for number in stages:
            made = self.written(range(stages.start, number))
            found.update(dict.fromkeys(name for name in self.stages[number].reads if name not in made))
        return tuple(found)

    def draw(self, number: int, fields: Fields, seed: int) -> Params:
        """Returns the drawn parameters of stage ``number`` for the sample with this seed, by name.

        They are NumPy values, and a function of the seed, the stage's number and its ``meta`` fields alone. Raises what
        the stage's ``draw`` raises, and OverflowError for a Python integer beyond 32 bits.
        """
        return self.stages[number].drawn(number, fields, seed)

    def features(self, fields: Fields) -> tuple[float, ...]:
        """Returns numbers that predict the sample's cost, one for each of ``feature_names``.

        ``fields`` are those known after the host read, ``run(..., stop=host_prefix)``. Raises StageError, whose
        ``__cause__`` is what a stage's ``features`` raised, or says what is wrong with what it returned.
        """
        values: list[float] = []
        for stage in self.stages:
            if stage.features is not None:
                try:
                    values += _numbers(stage.features(fields), stage.feature_names)
                except Exception as error:
                    where = f"features of stage {stage.name!r} of pipeline {self.name!r}"
                    add_note(error, f"in {where}")
                    raise stage_error(stage.name, "cpu", fields, error, where) from error
        return tuple(values)

    def run(
        self,
        fields: Fields,
        seed: int,
        start: int = 0,
        stop: int | None = None,
        before_stage: Callable[[int], None] | None = None,
    ) -> dict[str, Value]:
        """Runs stages from ``start`` to before ``stop`` (None: to the end) on the CPU and returns the fields.

        To the end of the pipeline only the outputs are returned, in their order; before it, every field known so far.
        ``before_stage(number)`` is called before each stage. Raises StageError, whose ``__cause__`` is the stage's own
        exception, or says what ``fields`` lack, and TypeError for fields that are no mapping; KeyboardInterrupt and the
        like pass through.
        """
        end = len(self.stages) if stop is None else stop
        known = dict(self.check_given(fields) if start == 0 else fields)
        for number in range(start, end):
            if before_stage is not None:
                before_stage(number)
            known.update(self.run_stage(number, known, seed))
        return known if end < len(self.stages) else {name: known[name] for name in self.outputs}

    def run_stage(
        self,
        number: int,
        fields: Fields,
        seed: int,
        cpu: CpuFunction | None = None,
        writes: Mapping[str, Field] | None = None,
    ) -> Fields:
        """Runs one stage on the CPU and returns what it writes. It gets no other fields than it declares to read, as
        on a device.

        ``cpu`` and ``writes``: a function to run in place of the stage's own, and what that writes (see ``Keepable``).
        Raises StageError, whose ``__cause__`` is the exception of the function, or says what is wrong with its result.
        """
        stage = self.stages[number]
        names = stage.reads if cpu is None or stage.keep is None else {*stage.reads, *stage.keep.writes}
        reads = {name: fields[name] for name in names if name in fields}
        try:
            written = (cpu or stage.cpu)(reads, stage.drawn(number, fields, seed))
            return check_written(stage.writes if writes is None else writes, written)
        except Exception as error:
            if isinstance(error, KeyError) and str in map(type, error.args[:1]) and error.args[0] in fields:
                add_note(error, f"stage {stage.name!r} reads this field, which is not among its reads {stage.reads}")
            raise stage_error(stage.name, "cpu", fields, error) from error

    def check_given(self, fields: Fields) -> Fields:
        """Returns what the data set has returned, with Python numbers in the declared types.

        Raises TypeError if that is no mapping, and StageError, caused by a ValueError, if it lacks a field or has one
        that is not as declared.
        """
        given: object = fields
        if not isinstance(given, Mapping):
            names = ", ".join(map(repr, self.input_fields))
            raise TypeError(
                f"with a pipeline the data set returns the first stage's fields, a mapping of {names}; "
                f"it returned a {type(given).__name__}"
            )
        problem = self._problem(fields)
        if problem is not None:
            error = ValueError(problem)
            raise stage_error(None, "cpu", fields, error) from error
        typed = {name: one.typed(fields[name]) for name, one in self._scalars if name in fields}
        return {**fields, **typed} if typed else fields

    def _problem(self, fields: Fields) -> str | None:
        if not fields.keys() >= self._needed:
            missing = ", ".join(map(repr, sorted(self._needed - fields.keys())))
            found = ", ".join(map(repr, fields)) or "none"
            return f"the pipeline needs field {missing} of the data set's samples; this one has {found}"
        for name, one in self._declared:
            problem = one.problem(fields[name]) if name in fields else None
            if problem is not None:
                return f"the data set's field {name!r} {problem}"
        return None

    @cached_property
    def _declared(self) -> tuple[tuple[str, Field], ...]:
        return tuple((name, one) for name, one in (self.inputs or {}).items() if one.dtype != object)

    @cached_property
    def _scalars(self) -> tuple[tuple[str, Field], ...]:
        return tuple((name, one) for name, one in self._declared if one.shape == ())

    @cached_property
    def _needed(self) -> frozenset[str]:
        return self.live(0)


def _numbers(found: object, names: Sequence[str]) -> list[float]:
    """Returns features as floats. Raises TypeError or ValueError unless there is one for each name."""
    if not isinstance(found, Iterable):
        raise TypeError(f"returned a {type(found).__name__}, not a sequence of numbers for {tuple(names)}")
    numbers = [float(value) for value in found]
    if len(numbers) != len(names):
        raise ValueError(f"returned {len(numbers)} features for {tuple(names)}")
    return numbers


def _check_stages(stages: Sequence[Stage]) -> None:
    if not stages:
        raise ValueError("a pipeline needs at least one stage")
    names: set[str] = set()
    for stage in stages:
        given: object = stage
        if not isinstance(given, Stage):
            raise TypeError(f"stages must be Stage objects, got {given!r}")
        if stage.name in names:
            raise ValueError(f"two stages are called {stage.name!r}")
        names.add(stage.name)
        if not stage.writes:
            raise UndeclaredWrites(stage.name, stages)


def _check_flow(stages: Sequence[Stage], inputs: Mapping[str, Field], outputs: Sequence[str]) -> None:
    known = set(inputs)
    for stage in stages:
        for name in (*stage.reads, *stage.meta):
            if name not in known:
                raise ValueError(
                    f"stage {stage.name!r} reads field {name!r}, which is no input and no earlier stage writes; "
                    f"known are {sorted(known)}"
                )
        known |= stage.writes.keys()
    for name in outputs:
        if name not in known:
            raise ValueError(f"output {name!r} is neither an input nor written by a stage; known are {sorted(known)}")


def _check_meta(stages: Sequence[Stage], inputs: Mapping[str, Field], host_prefix: int) -> None:
    # A draw that looked at a field made later would depend on the lane that made it.
    early = set(inputs).union(*(stage.writes for stage in stages[:host_prefix]))
    for number, stage in enumerate(stages):
        for name in stage.meta:
            late = [s.name for s in stages[host_prefix:number] if name in s.writes]
            if name not in early or late:
                by = f"stage {late[0]!r} writes" if late else "is not known then"
                raise ValueError(f"stage {stage.name!r} draws from {name!r}, not fixed by the host read: {by}")
