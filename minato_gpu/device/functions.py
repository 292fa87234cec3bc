"""Consecutive CuPy or torch stages, run sample by sample."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping

import numpy as np
import torch

from minato_gpu.device.accelerator import Accelerator
from minato_gpu.device.collated import mapped
from minato_gpu.device.segments import Segment
from minato_gpu.device.staging import Upload
from minato_gpu.device.values import Batch, Drawn, as_tensor, to_numpy
from minato_gpu.pipeline import Pipeline
from minato_gpu.samples import Value
from minato_gpu.stages import CupyFunction, TorchFunction


class FunctionSegment(Segment):
    """Consecutive CuPy or torch stages, run sample by sample: over NumPy or CPU tensors where the device is "cpu".

    ``upload``: how arrays come to a GPU for torch, made by the first run if not given.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stages: range,
        made: frozenset[str] = frozenset(),
        *,
        device: str,
        upload: Upload | None = None,
    ) -> None:
        super().__init__(pipeline, stages, made, device)
        self._upload = upload

    def run(self, batch: Batch, drawn: Drawn) -> list[dict[str, Value]]:
        """See Segment."""
        return [self._one(fields, params) for fields, params in zip(batch, drawn, strict=True)]

    def load(self) -> None:
        """See Segment."""
        if self._device != "cpu" and isinstance(self._members[0].device, CupyFunction):
            importlib.import_module("cupy")

    def _one(self, fields: Mapping[str, Value], params: Mapping[int, Mapping[str, Value]]) -> dict[str, Value]:
        known = self._uploaded(fields)  # in the library's own type
        results: dict[str, Value] = {}
        for number, stage in zip(self.stages, self._members, strict=True):
            self.at.enter(number, params)
            known.update((name, self._taken(name, fields[name])) for name in stage.reads if name not in known)
            given = {name: _copied(value) for name, value in params[number].items()}
            made = self._call(stage.device, {name: known[name] for name in stage.reads}, given)
            if made.keys() != stage.writes.keys():
                raise ValueError(f"returned the fields {sorted(made)}, declared {sorted(stage.writes)}")
            known.update(made)
            results.update(made)
        return {name: self._left(name, value) for name, value in results.items()} if self._device == "cpu" else results

    def _left(self, name: str, value: Value) -> Value:
        """What a function on the CPU has made, as an array, unless it is declared to be an object and is no array."""
        is_object = self.writes[name].dtype == np.dtype(object) and not hasattr(value, "__dlpack__")
        return value if is_object else to_numpy(value)

    def _call(self, how: object, reads: Mapping[str, Value], params: Mapping[str, Value]) -> Mapping[str, Value]:
        if isinstance(how, CupyFunction):
            return how.function(self._xp(), reads, params)
        assert isinstance(how, TorchFunction)
        made = how.function(reads, params)  # with gradients on, which no library and no batch takes
        return {name: value.detach() if hasattr(value, "detach") else value for name, value in made.items()}

    def _xp(self) -> Value:
        return importlib.import_module("numpy" if self._device == "cpu" else "cupy")

    def _uploaded(self, fields: Mapping[str, Value]) -> dict[str, Value]:
        """For torch, the arrays among the fields that come from outside, on the device. CuPy stages them by itself."""
        if self._device == "cpu" or isinstance(self._members[0].device, CupyFunction):
            return {}
        names = [name for name in self._reads if isinstance(fields.get(name), (np.ndarray, np.generic))]
        if not names:
            return {}
        if self._upload is None:
            self._upload = Upload(Accelerator(torch.device(self._device)))
        return dict(zip(names, self._upload.bring([np.asarray(fields[name]) for name in names]), strict=True))

    def _taken(self, name: str, value: Value) -> Value:
        """A field from outside, in the library's own type. What the host read left must stay as it is: a function may
        work in place, and be tried again."""
        lasts = name not in self._made
        if isinstance(self._members[0].device, CupyFunction):
            return _on_device(self._xp(), value, lasts)
        if self._device == "cpu" and not lasts and _lendable(value):
            return torch.utils.dlpack.from_dlpack(value)
        if lasts and isinstance(value, torch.Tensor):
            return value.to(self._device, copy=True)
        if lasts and not isinstance(value, np.ndarray):
            value = _copied(value)
        return as_tensor(value, self._device)


def _lendable(value: Value) -> bool:
    """Whether torch takes the array by DLPack: not if it is read-only or mirrored."""
    return isinstance(value, np.ndarray) and value.flags.writeable and all(stride >= 0 for stride in value.strides)


def _on_device(xp: Value, value: Value, lasts: bool) -> Value:
    """``lasts``: of a value that must stay as it is."""
    if isinstance(value, (np.ndarray, np.generic)):
        return xp.array(value) if lasts else xp.asarray(value)
    if hasattr(value, "__dlpack__"):
        shared = xp.from_dlpack(value)
        return xp.array(shared) if lasts else shared
    return _copied(value) if lasts else value


def _copied(value: Value) -> Value:
    """A copy for a function, which may work in place and be tried again; what cannot be copied as it is."""
    memo: dict[int, Value] = {}
    try:
        mapped(value, lambda tensor: memo.setdefault(id(tensor), tensor.clone()))  # without the rest of their storage
        return copy.deepcopy(value, memo)
    except Exception:  # runs the value's own code: no error of the sample's
        return value
