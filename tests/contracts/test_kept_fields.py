"""Fields of samples that stay for later epochs: every sample is what it is without, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minato_gpu import DataLoader, read_bytes
from minato_gpu.pipeline.pipeline import Field, Keepable, Pipeline, Stage
from minato_gpu.sources import fields as kept_fields
from tests.contracts.cached import SAMPLES, Files, close, loader_of, of_tier, write_files
from tests.contracts.modes import BOUNDED_8, BOUNDED_8_THREADS, IN_ORDER, IN_ORDER_THREADS, Mode

Fields = Mapping[str, Any]
_ENOUGH = 1 << 22
_CROP = 16


class Photographs(Files):
    """What is at the end of a path, and a number beside it."""

    more = 0

    def __getitem__(self, key: int) -> Any:
        return {"source": self.source(key), "key": key, "more": np.array([self.more])}


def _read(fields: Fields, _: Fields) -> Fields:
    return {"data": read_bytes(fields["source"])}


def _decode(fields: Fields, _: Fields) -> Fields:
    return {"picture": np.sort(fields["data"]) + fields["more"].astype(np.uint8), "name": f"of {fields['key']}"}


def _draw(rng: np.random.Generator, _: Fields) -> Fields:
    return {"at": int(rng.integers(0, 1000))}


def _crop(fields: Fields, params: Fields) -> Fields:
    at = int(params["at"])
    fields["picture"][at] ^= 0  # works in place, and changes nothing
    return {"x": fields["picture"][at : at + _CROP].astype(np.int64) + len(fields["name"])}


def _both(fields: Fields, params: Fields) -> Fields:
    return _crop({**fields, **_decode(fields, {})}, params)


_PICTURE = {"picture": Field(np.uint8, (None,)), "name": Field(object)}
_READ = Stage("read", ("source",), {"data": Field(np.uint8, (None,))}, _read)
_X = {"x": Field(np.int64, (_CROP,))}
APART = Pipeline(
    (
        _READ,
        Stage("decode", ("data", "more", "key"), _PICTURE, _decode),
        Stage("crop", ("picture", "name"), _X, _crop, draw=_draw),
    ),
    outputs=("x", "key"),
)
IN_ONE = Pipeline(
    (
        _READ,
        Stage(
            "crop",
            ("data", "more", "key"),
            _X,
            _both,
            draw=_draw,
            keep=Keepable(("data", "more", "key"), _PICTURE, lambda fields: _decode(fields, {}), _crop),
        ),
    ),
    outputs=("x", "key"),
)
PIPELINES = {"stages": APART, "a part of one": IN_ONE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few samples are enough to choose, preparing is what takes time, and no fields are dropped because the reader
    process has no core to take those before."""
    monkeypatch.setattr(kept_fields, "LEARNED", 4)
    monkeypatch.setattr(kept_fields.FieldPolicy, "observe", _observe)


_really_observe = kept_fields.FieldPolicy.observe


def _observe(self: kept_fields.FieldPolicy, nbytes: int, saved_s: float, prepare_s: float) -> None:
    _really_observe(self, nbytes, 0.9, 1.0)


def epoch(loader: DataLoader[Any]) -> list[tuple[Any, ...]]:
    return [(int(key), *x.tolist()) for batch in loader for key, x in zip(batch["key"], batch["x"], strict=True)]


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("mode", [IN_ORDER, BOUNDED_8, IN_ORDER_THREADS, BOUNDED_8_THREADS], ids=lambda mode: mode.name)
def test_samples_are_what_they_are_without(
    folder: Path, mode: Mode, workers: int, persistent: bool, pipeline: str
) -> None:
    more = {**dict(mode.arguments), "num_workers": workers, "persistent_workers": persistent}
    more["pipeline"] = PIPELINES[pipeline]
    plain, cached = loader_of(Photographs(folder), **more), loader_of(Photographs(folder), _ENOUGH, **more)
    for _ in range(3):
        expected, got = epoch(plain), epoch(cached)
        assert (sorted(got) if mode.lateness else got) == (sorted(expected) if mode.lateness else expected)
    for loader in (plain, cached):
        close(loader)
    assert of_tier(cached)["fields"] > SAMPLES // 2
    assert cached.stats()["reads"]["by_workers"] == 0
    assert "fields of 100%" in str(of_tier(cached)["kept"])


def test_what_the_data_set_gave_before_is_not_taken_for_what_it_gives_now(folder: Path) -> None:
    """It may change between epochs, as workers are started anew."""
    data = Photographs(folder), Photographs(folder)
    plain, cached = loader_of(data[0], pipeline=APART), loader_of(data[1], _ENOUGH, pipeline=APART)
    for more in (0, 0, 0, 7, 7, 0):
        data[0].more = data[1].more = more
        assert epoch(cached) == epoch(plain)
    assert of_tier(cached)["hits"] == SAMPLES, "the first ones are found again"


def _brighter(fields: Fields, _: Fields, *, by: int) -> Fields:
    return {"picture": np.sort(fields["data"]) + np.uint8(by), "name": f"of {fields['key']}"}


def _settings(by: int) -> Pipeline:
    """Equal names, whatever the settings are."""
    decode = Stage("decode", ("data", "more", "key"), _PICTURE, partial(_brighter, by=by))
    return Pipeline((_READ, decode, APART.stages[2]), outputs=APART.outputs)


def test_what_a_pipeline_made_before_is_not_taken_for_what_another_makes(folder: Path) -> None:
    plain, cached = (loader_of(Photographs(folder), cache, pipeline=_settings(0)) for cache in (None, _ENOUGH))
    hits = []
    for by in (0, 7):
        plain.pipeline = cached.pipeline = _settings(by)
        for _ in range(3):
            assert epoch(cached) == epoch(plain)
            hits.append(of_tier(cached)["hits"])
    assert hits[2] == hits[5] == SAMPLES, "what is kept stays while nothing has changed"
    assert hits[3] == 0


def _noise(fields: Fields, _: Fields) -> Fields:
    noise = np.random.randint(256, size=fields["picture"].shape) if fields["picture"].sum() % 2 else 0
    return {"picture": fields["picture"] + np.uint8(noise), "name": fields["name"]}


def test_what_depends_on_a_draw_from_a_global_generator_is_not_kept(folder: Path) -> None:
    """A stage with a Compose from elsewhere, which draws for some samples, does not say that it draws."""
    noise = Stage("noise", ("picture", "name"), _PICTURE, _noise)
    pipeline = Pipeline((*APART.stages[:2], noise, APART.stages[2]), outputs=APART.outputs)
    more: dict[str, Any] = {"pipeline": pipeline, "num_workers": 2, "persistent_workers": True}
    plain, cached = loader_of(Photographs(folder), **more), loader_of(Photographs(folder), _ENOUGH, **more)
    for _ in range(3):
        assert epoch(cached) == epoch(plain)
