"""Runs consecutive CuPy or torch stages, sample by sample."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping

import numpy as np
import torch

from minato_gpu.device.accelerator import Accelerator
from minato_gpu.device.collated import mapped
from minato_gpu.device.segments import Segment
from minato_gpu.device.staging import upload
from minato_gpu.device.values import Batch, Drawn, as_tensor, to_numpy
from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.pipeline.stages import CupyFunction, TorchFunction
from minato_gpu.samples import Value


class FunctionSegment(Segment):
    """Segment of CuPy or torch stages; on device "cpu" they get NumPy arrays or CPU tensors.

    ``accelerator``: copies the arrays that torch stages read to the GPU; None: made for the first of them.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stages: range,
        made: frozenset[str] = frozenset(),
        *,
        device: str,
        accelerator: Accelerator | None = None,
    ) -> None:
        super().__init__(pipeline, stages, made, device)
        self._accelerator = accelerator

    def run(self, batch: Batch, drawn: Drawn) -> list[dict[str, Value]]:
        return [self._run_sample(fields, params) for fields, params in zip(batch, drawn, strict=True)]

    def load(self) -> None:
        if self._device != "cpu" and isinstance(self._members[0].device, CupyFunction):
            importlib.import_module("cupy")

    def _run_sample(self, fields: Mapping[str, Value], params: Mapping[int, Mapping[str, Value]]) -> dict[str, Value]:
        known = self._uploaded(fields)  # fields in the library's own type
        results: dict[str, Value] = {}
        for number, stage in zip(self.stages, self._members, strict=True):
            self.at.enter(number, params)
            known.update((name, self._adopt(name, fields[name])) for name in stage.reads if name not in known)
            given = {name: _copy_for_function(value) for name, value in params[number].items()}
            made = self._call(stage.device, {name: known[name] for name in stage.reads}, given)
            if made.keys() != stage.writes.keys():
                raise ValueError(f"returned the fields {sorted(made)}, declared {sorted(stage.writes)}")
            known.update(made)
            results.update(made)
        return (
            {name: self._as_array(name, value) for name, value in results.items()} if self._device == "cpu" else results
        )

    def _as_array(self, name: str, value: Value) -> Value:
        """Returns a CPU function's result as a NumPy array; unchanged if its field is declared as ``object`` and it
        is no array or tensor."""
        is_object = self.writes[name].dtype == np.dtype(object) and not hasattr(value, "__dlpack__")
        return value if is_object else to_numpy(value)

    def _call(self, how: object, reads: Mapping[str, Value], params: Mapping[str, Value]) -> Mapping[str, Value]:
        if isinstance(how, CupyFunction):
            return how.function(self._xp(), reads, params)
        assert isinstance(how, TorchFunction)
        made = how.function(reads, params)  # may require gradients, which a batch must not
        return {name: value.detach() if hasattr(value, "detach") else value for name, value in made.items()}

    def _xp(self) -> Value:
        return importlib.import_module("numpy" if self._device == "cpu" else "cupy")

    def _uploaded(self, fields: Mapping[str, Value]) -> dict[str, Value]:
        """Copies the arrays that torch stages read to their GPU together; returns the tensors by field name.

        Empty on device "cpu", and for CuPy stages, whose arrays ``_adopt`` copies.
        """
        if self._device == "cpu" or isinstance(self._members[0].device, CupyFunction):
            return {}
        names = [name for name in self._reads if isinstance(fields.get(name), (np.ndarray, np.generic))]
        if not names:
            return {}
        if self._accelerator is None:
            self._accelerator = Accelerator(torch.device(self._device))
        return dict(zip(names, upload(self._accelerator, [np.asarray(fields[n]) for n in names]), strict=True))

    def _adopt(self, name: str, value: Value) -> Value:
        """Returns an input field in the library's own type. Fields that no device stage has made are copied: a
        function may change them in place, and the sample may be run again."""
        if name not in self._made and not isinstance(value, np.ndarray):  # arrays are copied below
            value = _copy_for_function(value.to(self._device) if isinstance(value, torch.Tensor) else value)
        if not isinstance(self._members[0].device, CupyFunction):
            return as_tensor(value, self._device)
        if not isinstance(value, np.generic) and not hasattr(value, "__dlpack__"):
            return value
        if self._device == "cpu":
            value = to_numpy(value)
        return self._xp().array(value) if isinstance(value, (np.ndarray, np.generic)) else self._xp().from_dlpack(value)


def _copy_for_function(value: Value) -> Value:
    """Returns a copy that a function may change; the value itself where it cannot be copied."""
    memo: dict[int, Value] = {}
    try:
        mapped(value, lambda tensor: memo.setdefault(id(tensor), tensor.clone()))  # without the rest of its storage
        return copy.deepcopy(value, memo)
    except Exception:  # the value's own code runs
        return value
