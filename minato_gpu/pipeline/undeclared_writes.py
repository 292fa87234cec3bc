"""Stages that do not declare what they write: refused, and shown what to declare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from minato_gpu.pipeline.stages import Fields, Stage, stage_error
from minato_gpu.samples import Value, sample_seed


class UndeclaredWrites(ValueError):
    """A stage does not declare what it writes. ``stages`` are all stages of its pipeline."""

    def __init__(self, name: str, stages: Sequence[Stage]) -> None:
        super().__init__(
            f"stage {name!r} does not declare what it writes; `minato-gpu check` on its module, or "
            "minato_gpu.pipeline.undeclared_writes.suggest_writes(stages, samples), shows what to declare"
        )
        self.stages = stages


def suggest_writes(stages: Sequence[Stage], samples: Iterable[Fields]) -> str:
    """Shows what stages without ``writes`` should declare, by running all stages on some samples on the CPU.

    Args:
        stages: of a pipeline, in order.
        samples: some items of the data set, as different as they come: a size in which they agree is taken to be fixed.

    Returns:
        Text to paste, a line for each such stage, with None for sizes that differ among the samples.

    Raises:
        StageError: a stage failed.
    """
    found: dict[str, dict[str, list[Value]]] = {stage.name: {} for stage in stages if not stage.writes}
    for index, sample in enumerate(samples):
        known = dict(sample)
        for number, stage in enumerate(stages):
            try:
                params = stage.drawn(number, known, sample_seed(0, 0, index))
                written = dict(stage.cpu({name: known[name] for name in stage.reads}, params))
            except Exception as error:
                raise stage_error(stage.name, "cpu", known, error) from error
            known |= written
            for name, value in written.items() if stage.name in found else ():
                found[stage.name].setdefault(name, []).append(value)
    lines = []
    for name, fields in found.items():
        declared = ", ".join(f'"{field}": {_declaration(values)}' for field, values in fields.items())
        lines.append(f"{name}: writes={{{declared}}},")
    return "\n".join(lines)


def _declaration(values: Sequence[Value]) -> str:
    """Returns the Python text of a Field that fits all of these values."""
    if not all(isinstance(value, (np.ndarray, np.generic, bool, int, float)) for value in values):
        return "Field(object)"
    arrays = [np.asarray(value) for value in values]
    kinds = {(array.dtype, array.ndim) for array in arrays}
    dtype = arrays[0].dtype
    if len(kinds) > 1 or dtype.kind not in "biufc" or not dtype.isnative:
        return "Field(object)"
    sizes = map(set, zip(*(array.shape for array in arrays), strict=True))
    shape = tuple(size.pop() if len(size) == 1 else None for size in sizes)
    return f"Field(np.{dtype.name}, {shape})" if shape else f"Field(np.{dtype.name})"
