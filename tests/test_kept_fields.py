"""Which fields of a pipeline depend on no draw, and runs that make them or begin with them: the same samples."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu.memory import blobs
from minato_gpu.pipeline.kept_fields import KeepableFields, Kept
from minato_gpu.pipeline.pipeline import Field, Keepable, Pipeline, Stage
from minato_gpu.pipeline.stages import Fields, Params

ARRAY = Field(np.int64, (None,))
ran: list[str] = []


def stage(name: str, reads: str, writes: str, *, drawn: bool = False, meta: str = "", **more: Any) -> Stage:
    """Writes a sum of what it reads, and of what it drew."""

    def cpu(fields: Fields, params: Params) -> Fields:
        ran.append(name)
        total = sum((fields[each] for each in reads.split()), np.zeros(3, np.int64))
        return {each: total * 10 + len(each) + params.get("drawn", 0) for each in writes.split()}

    draw = (lambda rng, _: {"drawn": rng.integers(1, 9, 3)}) if drawn else None
    fields = dict.fromkeys(writes.split(), ARRAY)
    return Stage(name, tuple(reads.split()), fields, cpu, draw=draw, meta=tuple(meta.split()), **more)


def pipeline(*stages: Stage, outputs: str = "z") -> Pipeline:
    return Pipeline(stages, outputs=tuple(outputs.split()))


def _crop(fields: Fields, params: Params) -> Fields:
    ran.append("crop of it")
    return {"z": (fields["whole"] + fields["b"]) * 10 + 1 + params["drawn"]}


def _whole(fields: Fields) -> Fields:
    ran.append("whole")
    return {"whole": fields["a"] + 0}


KEEP = Keepable(("a",), {"whole": ARRAY}, _whole, _crop)

CASES: dict[str, tuple[Pipeline, dict[int, set[str]], tuple[str, ...]]] = {
    "what comes before the draw": (
        pipeline(stage("read", "a", "b"), stage("decode", "b", "c"), stage("crop", "c", "z", drawn=True)),
        {1: {"c"}},
        ("crop",),
    ),
    "field by field": (
        pipeline(
            stage("read", "a", "b size"),
            stage("box", "size", "box", drawn=True, meta="size"),
            stage("decode", "b", "c"),
            stage("crop", "c box", "z"),
        ),
        {0: {"size"}, 2: {"c"}},
        ("box", "crop"),
    ),
    "a name written twice": (
        pipeline(
            stage("read", "a", "x"),
            stage("turn", "x", "y", drawn=True),
            stage("again", "a", "x"),
            stage("join", "x y", "z"),
        ),
        {0: {"x"}, 2: {"x"}},
        ("turn", "join"),
    ),
    "a part of a stage": (
        pipeline(stage("read", "a", "b"), stage("crop", "a b", "z", drawn=True, keep=KEEP)),
        {0: {"b"}, 1: {"whole"}},
        ("crop of it",),
    ),
    "no part of a stage that reads what was drawn": (
        pipeline(stage("turn", "a", "a", drawn=True), stage("crop", "a b", "z", drawn=True, keep=KEEP)),
        {},
        ("turn", "crop"),
    ),
    "nothing": (pipeline(stage("turn", "a", "b", drawn=True), stage("join", "b", "z")), {}, ("turn", "join")),
}


def given() -> dict[str, Any]:
    return {"a": np.array([1, 2, 3]), "b": np.array([4, 5, 6]), "path": "/a"}


def no_stage(_: int) -> None:
    """Nobody is told."""


@pytest.mark.parametrize("case", CASES)
def test_runs_with_kept_fields_are_the_same(case: str) -> None:
    made_of, kept, left = CASES[case]
    keepable = KeepableFields(made_of)
    assert bool(keepable) == bool(kept)
    expected = made_of.run(given(), 7)
    for _ in range(40):  # the first ones also compare what a part of a stage would save
        made = keepable.make(given(), 7, no_stage)
        assert made.prepare_s > 0
        assert made.saved_s >= 0
        equal(made.outputs, expected)
    assert made.kept is not None
    assert {number: set(fields) for number, fields in made.kept.items()} == kept
    buffers = blobs.pieces(blobs.dump((b"given", made.kept)))
    belongs_to, found = blobs.load(np.frombuffer(b"".join(buffers), np.uint8).copy())
    assert belongs_to == b"given"
    for seed in (7, 8):
        ran.clear()
        outputs = keepable.run(given(), found, seed, no_stage)
        assert tuple(ran) == left
        equal(outputs, made_of.run(given(), seed))


class Own(np.ndarray[Any, Any]):
    """A class of arrays of the user's own."""


def decoded(value: Callable[[np.ndarray[Any, Any]], Any]) -> KeepableFields:
    """Of a pipeline that makes such a value of a picture, which a stage that draws hands on as it is."""

    def decode(fields: Fields, _: Params) -> Fields:
        return {"b": value(np.random.default_rng(fields["a"]).random((90, 110, 3), np.float32))}

    same = Stage("same", ("b",), {"z": Field(object)}, lambda fields, _: {"z": fields["b"]}, draw=lambda rng, _: {})
    return KeepableFields(pipeline(Stage("decode", ("a",), {"b": Field(object)}, decode), same))


def loaded(kept: Kept | None) -> Any:
    """What comes of them when they have been in memory that processes share."""
    assert kept is not None
    return blobs.load(np.frombuffer(b"".join(blobs.pieces(blobs.dump(kept))), np.uint8).copy())


VIEWS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "upside down, in steps": lambda x: x[::-2, ::3],
    "spread out": lambda x: np.broadcast_to(x[0, 0], (40, 3)),
    "not aligned": lambda x: np.frombuffer(b"odd" + x.tobytes(), np.float32, offset=3),
    "a number": lambda x: x[5, 7, ...][1, ...],
    "memory map": lambda x: x.view(np.memmap)[:, ::-1],
    "of a list in a dictionary": lambda x: {"value": [x[3:83, 5:105]]},
    "tensor: of half precision": lambda x: torch.from_numpy(x).bfloat16()[::2, ::3],
    "tensor: conjugate": lambda x: torch.from_numpy(x).to(torch.complex64).conj(),
    "tensor: spread out": lambda x: torch.from_numpy(x)[0, 0].expand(40, 3),
}


def inside(value: Any) -> Any:
    return value["value"][0] if isinstance(value, dict) else value


@pytest.mark.parametrize("view", VIEWS)
def test_arrays_and_tensors_come_back_equal_without_gaps_and_writable(view: str) -> None:
    keepable = decoded(VIEWS[view])
    made = keepable.make(given(), 7, no_stage)
    found, expected = (
        inside(each["z"]) for each in (keepable.run(given(), loaded(made.kept), 8, no_stage), made.outputs)
    )
    assert (found.dtype, found.shape, found.tolist()) == (expected.dtype, expected.shape, expected.tolist())
    if isinstance(found, torch.Tensor):
        assert type(found) is torch.Tensor and not found.is_conj()
        assert found.is_contiguous()
    else:
        assert type(found) is np.ndarray and found.flags.forc and found.flags.writeable and found.flags.aligned


NOT_KEPT: dict[str, tuple[Callable[[np.ndarray[Any, Any]], Any], str]] = {
    "own class": (lambda x: x.view(Own), "Own of float32"),
    "masked": (lambda x: np.ma.masked_array(x, np.broadcast_to(x[..., :1] > 0.5, x.shape)), "MaskedArray of float32"),
    "objects": (lambda x: x.astype(object)[::2], "numpy.ndarray of object"),
    "in a list": (lambda x: [x, x.view(Own)], "Own of float32"),
    "parameter": (lambda x: torch.nn.Parameter(torch.from_numpy(x)), "Parameter on cpu that requires grad"),
    "requires grad": (lambda x: torch.from_numpy(x).requires_grad_(), "Tensor on cpu that requires grad"),
    "on a device": (lambda x: torch.empty(3, device="meta"), "Tensor on meta"),
    "what cannot be copied": (lambda x: threading.Lock(), "cannot pickle"),
}


@pytest.mark.parametrize("value", NOT_KEPT)
def test_what_is_not_kept_is_said(value: str) -> None:
    make, why_not = NOT_KEPT[value]
    made = decoded(make).make(given(), 7, no_stage)
    assert "z" in made.outputs and made.kept is None
    assert "the field 'b' cannot be kept: " in made.why_not and why_not in made.why_not


def equal(found: Fields, expected: Fields) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_what_the_data_set_gave_is_told_apart() -> None:
    keepable = KeepableFields(pipeline(stage("read", "a", "b"), stage("crop", "b path", "z", drawn=True)))
    first = keepable.given(given())
    assert first is not None
    assert first == keepable.given({**given(), "path": "/b"}), "no fixed stage reads it"
    assert first != keepable.given({**given(), "a": np.array([1, 2, 4])})
    assert keepable.given({"a": np.zeros(1 << 16)}) is None, "it has been read already"
    assert keepable.given({}) is None
    assert keepable.given({"a": lambda: 0}) is None


@dataclass
class Box:
    """An object of the user's own."""

    value: Any


def test_objects_come_back_as_their_own_code_copies_them() -> None:
    keepable = decoded(lambda x: Box([x[3:83, 5:105], "text"]))
    made = keepable.make(given(), 7, no_stage)
    found, expected = (
        each["z"].value for each in (keepable.run(given(), loaded(made.kept), 8, no_stage), made.outputs)
    )
    assert np.array_equal(found[0], expected[0]) and found[1] == "text"


def test_a_stage_that_works_in_place_spoils_nothing() -> None:
    def spoil(fields: Fields, params: Params) -> Fields:
        fields["b"][:] = -1
        return {"z": fields["b"] + params["drawn"]}

    drawn = stage("spoil", "b", "z", drawn=True)
    made_of = pipeline(stage("read", "a", "b"), Stage("spoil", ("b",), {"z": ARRAY}, spoil, draw=drawn.draw))
    made = KeepableFields(made_of).make(given(), 7, no_stage)
    assert made.kept is not None
    assert np.all(made.kept[0]["b"] > 0)
