"""Definitions of a pipeline's stages: fields, implementations, tolerances; checks of what they write.

Decision: a random stage depends on drawn parameters and header fields alone. ``draw`` gets a random stream that belongs
to (sample, stage) and the fields named by ``meta``, which the host knows before any lane is chosen; so whichever
implementation runs gets the same values (promise P2). DALI's and CuPy's own generators are never used. Rejected:
letting each implementation draw for itself from a shared seed, because no two generators agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from minato_gpu.samples import Origin, StageError, Value, stream

Fields = Mapping[str, Value]
Params = Mapping[str, Value]
Draw = Callable[[np.random.Generator, Fields], Params]
CpuFunction = Callable[[Fields, Params], Fields]
_STACKED = frozenset(map(np.dtype, "?bhilqBHIefdFD"))  # of which torch's default_collate takes scalars: not uint64


@dataclass(frozen=True)
class Field:
    """One named value of a sample.

    A Python number is welcome where the shape is (), and becomes a NumPy scalar of the dtype (``numpy.float32(0.5)``):
    later stages, ``draw``, ``features`` and a ``collate_fn`` get that. What a device has made has that dtype, too; it
    may be an array of shape (). For uint64, of whose scalars PyTorch makes no batch, a Python number stays one.

    Args:
        dtype: anything that ``numpy.dtype`` takes; ``object`` for values that are not arrays (paths, text).
        shape: one entry per dimension, None where it varies from sample to sample; ``()`` for a scalar.
        maximum: the largest shape that can occur (elements per dimension), where one is known.
        layout: names of the dimensions for DALI, such as "HWC"; needed where a DALI fragment depends on it.
        level: the change of this field's values that means one grey level (1/255 of the range) of the picture; parity
            reports deviations in levels, so that one limit fits bytes and normalised floats alike.

    Raises:
        TypeError, ValueError: a dtype, shape, maximum, layout or level makes no sense.
    """

    dtype: npt.DTypeLike
    shape: tuple[int | None, ...] = ()
    maximum: tuple[int, ...] | None = None
    layout: str = ""
    level: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        shape: object = self.shape
        if not isinstance(shape, Sequence) or not all(n is None or isinstance(n, Integral) for n in shape):
            raise TypeError(f"a field's shape must be a sequence of sizes or None, such as (3, None), got {shape!r}")
        object.__setattr__(self, "shape", tuple(self.shape))
        if any(n is not None and n < 0 for n in self.shape):
            raise ValueError(f"a field's shape must have sizes >= 0 or None, got {self.shape}")
        if self.layout and len(self.layout) != len(self.shape):
            raise ValueError(f"layout {self.layout!r} does not name each dimension of shape {self.shape}")
        if not self.level > 0:
            raise ValueError(f"a field's level must be > 0, got {self.level}")
        if self.maximum is not None:
            self._check_maximum(self.maximum)

    def _check_maximum(self, maximum: Sequence[int]) -> None:
        object.__setattr__(self, "maximum", tuple(maximum))
        fits = len(maximum) == len(self.shape) and all(
            n is None or n == m for n, m in zip(self.shape, maximum, strict=True)
        )
        if not fits:
            raise ValueError(f"maximum {tuple(maximum)} does not bound shape {self.shape}")

    @property
    def max_bytes(self) -> int | None:
        """The most bytes that one value takes; None for an object, or where neither shape nor ``maximum`` bounds it."""
        if np.dtype(self.dtype) == np.dtype(object):
            return None
        sizes = self.maximum if None in self.shape else self.shape
        if sizes is None:
            return None
        return math.prod(n for n in sizes if n is not None) * np.dtype(self.dtype).itemsize

    def problem(self, value: Value) -> str | None:
        """Returns what is wrong with ``value`` as this field, or None.

        Python numbers are allowed if the shape is () and the dtype has them: 2.5 is no integer, and 256 no uint8.
        """
        if self.dtype.kind == "O":  # type: ignore[union-attr]  # it is a dtype, see ``__post_init__``
            return None
        if type(value) is np.ndarray and value.shape == self.shape and value.dtype == self.dtype:
            return None  # the usual one, soonest; ``maximum`` bounds the shape
        if not isinstance(value, (np.ndarray, np.generic)):
            if self.shape == () and isinstance(value, (bool, int, float)):
                return None if self._has(value) else f"is {value!r}, which is no {self.dtype}"
            return f"is a {type(value).__name__}, not a NumPy array of {self.dtype}"
        if value.dtype != self.dtype:
            return f"has dtype {value.dtype}, declared {self.dtype}"
        if len(value.shape) != len(self.shape) or any(
            n is not None and n != m for n, m in zip(self.shape, value.shape, strict=True)
        ):
            return f"has shape {value.shape}, declared {self.shape}"
        if self.maximum is not None and any(m > n for m, n in zip(value.shape, self.maximum, strict=True)):
            return f"has shape {value.shape}, over the declared maximum {self.maximum}"
        return None

    def typed(self, value: Value) -> Value:
        """Returns ``value``, which has no problem; a Python number as a NumPy scalar, if batches are made of such."""
        if self.shape or not isinstance(value, (bool, int, float)) or self.dtype not in _STACKED:
            return value
        return self._scalar(value)

    def _scalar(self, number: float) -> Value:
        make: Callable[[float], Value] = np.dtype(self.dtype).type
        return make(number)

    def _has(self, number: float) -> bool:
        """Returns whether ``dtype`` has the number, for floats but for rounding."""
        try:
            return bool(self._scalar(number) == number) or np.dtype(self.dtype).kind in "fc"
        except (TypeError, ValueError, OverflowError):
            return False


@dataclass(frozen=True)
class Tolerance:
    """Limits of a device implementation's deviation from the CPU's, in levels (see ``Field.level``).

    ``maximum`` bounds any single value, ``mean`` the mean absolute deviation of a sample.
    """

    maximum: float = 0.0
    mean: float = 0.0

    def __post_init__(self) -> None:
        if not (self.maximum >= 0 and self.mean >= 0):
            raise ValueError(f"a tolerance must be >= 0, got {self}")

    def __add__(self, other: Tolerance) -> Tolerance:
        return Tolerance(self.maximum + other.maximum, self.mean + other.mean)


@dataclass(frozen=True)
class DaliFragment:
    """A device implementation as a piece of a DALI graph.

    ``build(dali, fields, params, device)`` gets the module ``nvidia.dali``, the graph's nodes of the fields that
    the stage reads and of its drawn parameters, and "cpu" or "gpu"; it returns the nodes of the fields that the
    stage writes. Parameters are always host nodes (they are argument inputs of operators). Fields are device
    nodes when ``device`` is "gpu", save those named in ``host_reads`` (a decoder takes its bytes on the host).

    Graphs are built before there is a sample: ask for a parameter by its name. A fragment that looks at which there are
    (``in``, a loop) has its graph built with the first sample, and batches may wait for that.

    ``minato_gpu/pipelines/template.py`` is an example to copy, which says what is easily got wrong.
    """

    build: Callable[[ModuleType, Fields, Params, str], Fields]
    host_reads: tuple[str, ...] = ()
    kind = "dali"


@dataclass(frozen=True)
class CupyFunction:
    """A device implementation over an array module: ``function(xp, fields, params)``, xp CuPy or NumPy.

    It gets copies of its parameters and of what the host read left, objects too. It may change these in place, unless a
    later stage reads them or it is the stage's ``cpu`` as well.
    """

    function: Callable[[ModuleType, Fields, Params], Fields]
    kind = "cupy"

    def on_cpu(self, fields: Fields, params: Params) -> Fields:
        """Runs the function over NumPy: for a stage's ``cpu``, if that needs nothing of its own."""
        return self.function(np, fields, params)


@dataclass(frozen=True)
class TorchFunction:
    """A device implementation on tensors of the lane's device: ``function(fields, params)``.

    It gets copies of its parameters and of what the host read left, objects too. It may change these in place, unless a
    later stage reads them or it is the stage's ``cpu`` as well.
    """

    function: Callable[[Fields, Params], Fields]
    kind = "torch"


DeviceImplementation = DaliFragment | CupyFunction | TorchFunction


@dataclass(frozen=True)
class Keepable:
    """The part of a stage that depends on no draw, so that a cache may keep it from epoch to epoch.

    For a stage that does two things at once, such as decoding no more of a photograph than the drawn crop:
    ``make(fields)`` returns the fields ``writes`` (the whole photograph) from the fields ``reads`` alone, which are
    some of the stage's. ``cpu(fields, params)`` makes of them, and of what else the stage reads, what the stage's own
    ``cpu`` makes, bit for bit. Neither is called for a sample of which nothing is to be kept.
    """

    reads: tuple[str, ...]
    writes: Mapping[str, Field]
    make: Callable[[Fields], Fields]
    cpu: CpuFunction


@dataclass(frozen=True, eq=False)
class Stage:
    """One step of a pipeline.

    All functions must be module-level (or ``functools.partial`` of such), so that spawned workers can have them.

    Args:
        name: unique in its pipeline.
        reads: names of the fields it uses.
        writes: the fields it makes. A pipeline refuses a stage that declares none, ``{}``, and says how to be shown
            what to declare.
        cpu: ``cpu(fields, params)`` gets the fields of ``reads`` and the drawn parameters, and returns exactly the
            written fields; it must not change its inputs in place. What it draws from the global generators of random,
            NumPy and torch repeats on worker processes alone: use ``draw`` elsewhere.
        device: the same step for the device lane, or None if it runs on the host only.
        draw: ``draw(rng, meta)`` draws the sample's parameters, by name. Drawn Python numbers become 32-bit NumPy
            scalars, so that every implementation computes with the same values.
        meta: names of the fields that ``draw`` may look at, all known after the host read.
        features: ``features(fields)``: numbers that predict the stage's cost, from fields known after the host read.
        feature_names: a name for each of them.
        tolerance: by type of device ("cpu": the device implementation run by CPU operators, "cuda"), how far the device
            implementation may be from ``cpu``; a missing key means that they must be equal.
        keep: what a cache may keep of a stage that depends on a draw, if not all of it does (see ``Keepable``).

    Raises:
        TypeError, ValueError: a definition that cannot work.
    """

    name: str
    reads: tuple[str, ...]
    writes: Mapping[str, Field]
    cpu: CpuFunction
    device: DeviceImplementation | None = None
    draw: Draw | None = None
    meta: tuple[str, ...] = ()
    features: Callable[[Fields], Sequence[float]] | None = None
    feature_names: tuple[str, ...] = ()
    tolerance: Mapping[str, Tolerance] = field(default_factory=dict)
    keep: Keepable | None = None

    def __post_init__(self) -> None:
        name: object = self.name
        if not (isinstance(name, str) and name):
            raise TypeError(f"a stage needs a name that is a non-empty string, got {name!r}")
        for part in ("reads", "meta", "feature_names"):
            object.__setattr__(self, part, names_in(f"stage {self.name!r}: {part}", getattr(self, part)))
        check_values(f"stage {self.name!r}: writes", self.writes, Field)
        check_tolerance(f"stage {self.name!r}: tolerance", self.tolerance)
        object.__setattr__(self, "writes", dict(self.writes))
        object.__setattr__(self, "tolerance", dict(self.tolerance))
        self._check_values()
        self._check_agreement()

    def _check_values(self) -> None:
        for part in ("cpu", "draw", "features"):
            function = getattr(self, part)
            if not callable(function) and (part == "cpu" or function is not None):
                raise TypeError(f"stage {self.name!r}: {part} must be callable, got {function!r}")
        device: object = self.device
        if not isinstance(device, DeviceImplementation | None):
            raise TypeError(
                f"stage {self.name!r}: device must be a DaliFragment, CupyFunction or TorchFunction, got {device!r}"
            )

    def _check_agreement(self) -> None:
        if self.meta and self.draw is None:
            raise ValueError(f"stage {self.name!r} names meta fields but has no draw")
        if (self.features is None) != (not self.feature_names):
            raise ValueError(f"stage {self.name!r}: features and feature_names go together")
        self._check_read("host_reads", getattr(self.device, "host_reads", ()))
        keep: object = self.keep
        if not isinstance(keep, Keepable | None):
            raise TypeError(f"stage {self.name!r}: keep must be a Keepable, got {keep!r}")
        if keep is not None:
            check_values(f"stage {self.name!r}: keep.writes", keep.writes, Field)
            self._check_read("keep.reads", keep.reads)

    def _check_read(self, what: str, names: Iterable[str]) -> None:
        unknown = set(names) - set(self.reads)
        if unknown:
            raise ValueError(f"stage {self.name!r}: {what} {sorted(unknown)} are not among its reads")

    def drawn(self, number: int, fields: Fields, seed: int) -> Params:
        """Returns the parameters that it draws, as stage ``number`` of a pipeline, for the sample with this seed.

        They are in the form of ``canonical``. Raises as ``Pipeline.draw``.
        """
        if self.draw is None:
            return {}
        meta = {name: fields[name] for name in self.meta}
        return {name: canonical(value) for name, value in self.draw(stream(seed, number), meta).items()}


def names_in(what: str, names: object) -> tuple[str, ...]:
    """Returns ``names`` as a tuple. Raises TypeError unless they are a sequence of strings (no set, no iterator), and
    ValueError for one given twice. ``what`` begins the message."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"{what} must be a sequence of names, got {names!r}")
    if len(set(names)) != len(names):
        raise ValueError(f"{what} names a field twice: {tuple(names)}")
    return tuple(names)


def check_values(what: str, values: object, kind: type) -> None:
    """Raises TypeError unless ``values`` maps names to objects of ``kind``."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{what} must map names to {kind.__name__}, got {values!r}")
    for name, value in values.items():
        if not (isinstance(name, str) and isinstance(value, kind)):
            raise TypeError(f"{what} must map names to {kind.__name__}, got {name!r}: {value!r}")


def check_tolerance(what: str, tolerance: object) -> None:
    """Raises TypeError unless ``tolerance`` maps names to Tolerance, ValueError for a name but "cpu" and "cuda"."""
    check_values(what, tolerance, Tolerance)
    assert isinstance(tolerance, Mapping)
    for key in tolerance:
        if key not in ("cpu", "cuda"):
            raise ValueError(f"{what} is keyed by 'cpu' or 'cuda', got {key!r}")


def canonical(value: Value) -> Any:
    """Returns a drawn value in the form in which every implementation gets it: a NumPy scalar or array.

    Python bool becomes bool_, int becomes int32 (OverflowError beyond it), float becomes float32; sequences
    become arrays of the same; NumPy values stay as they are.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return value
    array = np.asarray(value)
    if array.dtype in (np.int64, np.uint64, np.object_):  # of ints; the last two beyond int64
        if any(isinstance(each, int) and not -(2**31) <= each < 2**31 for each in array.ravel().tolist()):
            raise OverflowError(f"drawn value {value!r} does not fit 32 bits; draw a NumPy array of int64 instead")
        array = array if array.dtype == np.object_ else array.astype(np.int32)
    elif array.dtype == np.float64:
        array = array.astype(np.float32)
    return array if array.ndim else array[()]


def check_written(declared: Mapping[str, Field], written: Fields) -> Fields:
    """Returns what a stage has written, with Python numbers in the declared types.

    Raises ValueError unless ``written`` holds exactly the declared fields, as declared.
    """
    found: object = written
    if not isinstance(found, Mapping):
        raise ValueError(f"returned a {type(found).__name__}, not a mapping of its written fields")
    if written.keys() != declared.keys():
        raise ValueError(f"returned the fields {sorted(written)}, declared {sorted(declared)}")
    typed = {}
    for name, one in declared.items():
        problem = one.problem(written[name])
        if problem is not None:
            raise ValueError(f"field {name!r} {problem}")
        if one.shape == ():
            typed[name] = one.typed(written[name])
    return {**written, **typed} if typed else written


def stage_error(
    stage: str | None, lane: str, fields: Fields, error: BaseException, where: str | None = None
) -> StageError:
    """Returns the StageError for ``error``, which the caller raises ``from error``.

    ``where``: what the message names as having failed; by default the stage, or the pipeline where ``stage`` is None.
    """
    path = fields.get("path")
    where = where or (f"stage {stage!r}" if stage is not None else "the pipeline")
    return StageError(
        f"{where} failed: {type(error).__name__}: {error}",
        Origin(stage=stage, lane=lane, path=None if path is None else str(path)),
    )
