"""What the samples of the cases are: how one is made from its key, how the samples of a batch are read, and what they
must contain."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from minato_gpu import Field, Pipeline, Stage
from minato_gpu.pipeline.pipeline import TorchFunction
from tests.contracts.cases import ELASTIC, FILES

ROW_BYTES = 8_000
UNEVEN_BYTES = 16_000
_X = Field(np.float32, (5,))


class Sample(NamedTuple):
    """One sample that came. ``content`` follows from the key; ``drawn``: numbers from random generators."""

    key: int
    content: Any
    drawn: tuple[float, ...]


@dataclass(frozen=True)
class Item:
    """A sample that is an object of a user's own class."""

    key: int
    name: str
    drawn: float


@dataclass(frozen=True)
class Kind:
    """A kind of sample.

    ``make``: the sample of a key. ``read``: the samples of a batch. ``content``: what the sample of a key contains.
    ``joins``: PyTorch's ``default_collate`` makes the batch, which else is the list of its samples.
    """

    make: Callable[[int], Any]
    read: Callable[[Any], Iterable[Sample]]
    content: Callable[[int], Any]
    joins: bool = True


def drawn() -> list[float]:
    """One number from each of the global generators."""
    return [random.random(), float(np.random.random_sample()), float(torch.rand((), dtype=torch.float64))]


def _columns(drawn: Any) -> list[tuple[float, ...]]:
    """The drawn numbers of each sample, of which a batch has columns."""
    return list(zip(*(each.tolist() for each in drawn), strict=True))


def _numbers(key: int) -> Any:
    return torch.tensor([key, key * key, *drawn()], dtype=torch.float64)


def _rows(key: int) -> Any:
    """Draws nothing: samples that draw are asked for one by one."""
    return torch.tensor([key, key * key, *[key] * (ROW_BYTES // 8 - 2)], dtype=torch.float64)


def _read_rows(batch: Any) -> Iterable[Sample]:
    return (Sample(int(row[0]), ({*row[2:]}, row[1]), ()) for row in batch.tolist())


def _read_numbers(batch: Any) -> Iterable[Sample]:
    return (Sample(int(row[0]), row[1], tuple(row[2:])) for row in batch.tolist())


def _mapping(key: int) -> Any:
    """Of odd keys the fields come in another order."""
    fields = {"key": key, "name": f"n{key}", "rest": (np.full((2, 3), key, np.float32), drawn())}
    return dict(reversed(fields.items())) if key % 2 else fields


def _read_mapping(batch: Any) -> Iterable[Sample]:
    arrays, numbers = batch["rest"]
    keys = batch["key"].tolist()
    order = "as of the first" if [*batch] == [*_mapping_fields(keys[0])] else "another"
    content = ((name, str(array), order) for name, array in zip(batch["name"], arrays.tolist(), strict=True))
    return map(Sample, keys, content, _columns(numbers))


def _mapping_fields(key: int) -> list[str]:
    return ["rest", "name", "key"] if key % 2 else ["key", "name", "rest"]


def _ragged(key: int) -> Any:
    return key, torch.full((2, 1 + key % 5), key).t(), drawn()


def _uneven(key: int) -> Any:
    return key, torch.full((UNEVEN_BYTES // 8 if key % 5 == 2 else 100,), key, dtype=torch.float64), drawn()


def _read_uneven(batch: Any) -> Iterable[Sample]:
    return (Sample(key, (len(tensor), {*tensor.tolist()}), tuple(numbers)) for key, tensor, numbers in batch)


def _closure(key: int) -> Any:
    numbers = _numbers(key)
    return lambda: numbers


def _read_ragged(batch: Any) -> Iterable[Sample]:
    return (Sample(key, (tensor.tolist(), tensor.stride()), tuple(numbers)) for key, tensor, numbers in batch)


def _objects(key: int) -> Any:
    return Item(key, f"n{key}", float(torch.randn(())))


def _read_objects(batch: Any) -> Iterable[Sample]:
    return (Sample(item.key, item.name, (item.drawn,)) for item in batch)


def _read_pipeline(batch: Any) -> Iterable[Sample]:
    values, labels, numbers = ({*x} for x in batch["x"].tolist()), batch["label"].tolist(), batch["drawn"].tolist()
    return (Sample(n, len(each), (max(each), *more)) for n, each, more in zip(labels, values, numbers, strict=True))


def file_of(key: int, version: int = 0) -> bytes:
    """What the file of a sample holds; ``version``: after so many changes."""
    return f"file {key} of {version} ".encode() * (100 + key)


def file_sample(key: int, data: bytes) -> Any:
    """The sample of a key whose file holds this."""
    return {"key": key, "sum": zlib.crc32(data), "drawn": drawn()}


def _read_files(batch: Any) -> Iterable[Sample]:
    return map(Sample, batch["key"].tolist(), batch["sum"].tolist(), _columns(batch["drawn"]))


def _square(key: int) -> float:
    return float(key * key)


def _read_fields(fields: Any, params: Any) -> Any:
    fields["tries"][:] += 1  # works in place: another try begins with what the data set has returned
    n = fields["make"](fields["n"])
    return {
        "x": np.full(5, n, np.float32),
        "label": n + 1_000 * (int(fields["tries"][0]) - 1),
        "drawn": np.array(drawn()),
    }


def _draw(rng: np.random.Generator, meta: Any) -> Any:
    return {"shift": rng.random(dtype=np.float32)}


def _shift(fields: Any, params: Any) -> Any:
    return {"x": fields["x"] + params["shift"]}


def _shift_on_device(fields: Any, params: Any) -> Any:
    return {"x": fields["x"] + torch.tensor(params["shift"])}


PIPELINE = Pipeline(
    (
        Stage(
            "read",
            ("n", "make", "tries"),
            {"x": _X, "label": Field(np.int64), "drawn": Field(float, (3,))},
            cpu=_read_fields,
        ),
        Stage("shift", ("x",), {"x": _X}, cpu=_shift, draw=_draw, device=TorchFunction(_shift_on_device)),
        Stage("again", ("x",), {"x": _X}, cpu=_shift, draw=_draw, device=TorchFunction(_shift_on_device)),
    ),
    outputs=("x", "label", "drawn"),
)


_NUMBERS = Kind(_numbers, _read_numbers, _square)
_FILES = Kind(lambda key: file_sample(key, file_of(key)), _read_files, lambda key: zlib.crc32(file_of(key)))
KINDS = {
    "numbers": _NUMBERS,
    "many at once": Kind(_rows, _read_rows, lambda key: ({float(key)}, _square(key))),
    "mapping": Kind(_mapping, _read_mapping, lambda key: (f"n{key}", str([[float(key)] * 3] * 2), "as of the first")),
    "ragged": Kind(_ragged, _read_ragged, lambda key: ([[key] * 2] * (1 + key % 5), (1, 1 + key % 5)), joins=False),
    "uneven": Kind(
        _uneven,
        _read_uneven,
        lambda key: (UNEVEN_BYTES // 8 if key % 5 == 2 else 100, {float(key)}),
        joins=False,
    ),
    "closures": Kind(_closure, _read_numbers, _square),
    "objects": Kind(_objects, _read_objects, lambda key: f"n{key}", joins=False),
    "pipeline": Kind(int, _read_pipeline, lambda key: 1),
    **dict.fromkeys(FILES, _FILES),
    **dict.fromkeys(("stream", "stateful stream", "stateful iterator", *ELASTIC), _NUMBERS),
}
