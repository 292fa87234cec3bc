"""Which nvJPEG is asked, and what its age means."""

from __future__ import annotations

import importlib.util
import os
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from minato_gpu import DataLoader, nvjpeg
from tests.numbers import PIPELINE, Numbers

Libraries = dict[str, nvjpeg.Version]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Libraries]:
    """Libraries by how they are opened: those "loaded" already, and those in "files"."""
    known: dict[str, Libraries] = {"loaded": {}, "files": {}}

    def ask(library: str, mode: int = 0) -> nvjpeg.Version | None:
        version = known["loaded" if mode & os.RTLD_NOLOAD else "files"].get(library)
        if version is not None:
            known["loaded"][Path(library).name] = version
        return version

    monkeypatch.setattr(nvjpeg, "_ask", ask)
    monkeypatch.setattr(nvjpeg, "_folders", lambda: [Path("/first"), Path("/packages")])
    return known


def test_what_is_loaded_counts_and_not_what_is_installed(libraries: dict[str, Libraries]) -> None:
    libraries["files"]["/packages/libnvjpeg.so.13"] = (13, 3, 2)
    libraries["loaded"]["libnvjpeg.so.12"] = (12, 4, 0)
    assert nvjpeg.loaded() == nvjpeg.found() == (12, 4, 0)
    assert not nvjpeg.decodes_regions()


def test_the_first_in_the_path_is_loaded(libraries: dict[str, Libraries]) -> None:
    libraries["files"] |= {"/packages/libnvjpeg.so.13": (13, 3, 2), "/first/libnvjpeg.so.13": (13, 1, 9)}
    assert nvjpeg.loaded() is None
    assert nvjpeg.found() == nvjpeg.loaded() == (13, 1, 9)
    assert not nvjpeg.decodes_regions()


def test_the_path_of_the_environment_comes_before_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "nvidia"
    package.mkdir(parents=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/first::{tmp_path}/second")
    found = SimpleNamespace(submodule_search_locations=[str(package)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    packages = [package / "cu13/lib", package / "nvjpeg/lib"]
    assert nvjpeg._folders() == [tmp_path / "first", tmp_path / "second", *packages]


def test_an_installation_for_cuda_13_brings_one_that_is_new_enough() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {one.name: one.specifier for one in map(Requirement, project["optional-dependencies"]["cuda13"])}
    assert "13.2" in wanted["nvidia-nvjpeg"] and "13.1.9" not in wanted["nvidia-nvjpeg"]


@pytest.mark.parametrize(("version", "regions"), [((13, 1, 99), False), ((13, 2, 0), True), ((14, 0, 0), True)])
def test_regions_since(libraries: dict[str, Libraries], version: nvjpeg.Version, regions: bool) -> None:
    libraries["loaded"]["libnvjpeg.so.13"] = version
    assert nvjpeg.decodes_regions() is regions


def test_nobody_knows_where_there_is_none(libraries: dict[str, Libraries]) -> None:
    assert nvjpeg.found() is None and nvjpeg.decodes_regions()


def test_the_library_here_says_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that ``pip install minato-gpu[cuda13]`` brings; no GPU is needed to ask it."""
    pytest.importorskip("nvidia.nvimgcodec")
    version: Any = nvjpeg.found()
    assert version is not None and version >= (13, 2, 0)
    assert nvjpeg.loaded() == version


@pytest.mark.parametrize(("version", "told"), [((12, 4, 0), "12.4.0"), (None, None)])
def test_stats_tell_the_version(monkeypatch: pytest.MonkeyPatch, version: Any, told: str | None) -> None:
    monkeypatch.setattr(nvjpeg, "loaded", lambda: version)
    loader = DataLoader(Numbers(), 8, num_workers=1, pipeline=PIPELINE, lanes=["device"])
    next(iter(loader))
    assert loader.stats()["device_lane"]["nvjpeg"] == told


@pytest.mark.parametrize(("said", "load"), [(None, 0.9), ("0", 0.0), ("0.65", 0.65), ("1", 1.0)])
def test_the_engines_share_is_set_from_outside(monkeypatch: pytest.MonkeyPatch, said: str | None, load: float) -> None:
    monkeypatch.delenv("MINATO_HW_DECODER_LOAD", raising=False)
    if said is not None:
        monkeypatch.setenv("MINATO_HW_DECODER_LOAD", said)
    assert nvjpeg.engine_load() == load


@pytest.mark.parametrize("said", ["most", "1.5", "-1", "nan", ""])
def test_a_share_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("MINATO_HW_DECODER_LOAD", said)
    with pytest.raises(ValueError, match="MINATO_HW_DECODER_LOAD"):
        nvjpeg.engine_load()
