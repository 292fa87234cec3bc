"""Which nvJPEG is asked, and what its age means."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from minato_gpu.device import nvjpeg

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

    monkeypatch.setattr(nvjpeg, "_version_of", ask)
    monkeypatch.setattr(nvjpeg, "_folders", lambda: [Path("/first"), Path("/packages")])
    monkeypatch.setattr(nvjpeg, "codec_version", lambda: "0.8.1.4")
    for name in (nvjpeg.REGIONS, nvjpeg.ENGINE_LOAD, nvjpeg.WAITS):
        monkeypatch.delenv(name, raising=False)
    return known


def test_what_is_loaded_counts_and_not_what_is_installed(libraries: dict[str, Libraries]) -> None:
    assert nvjpeg.found() is None and nvjpeg.decodes_regions(), "nobody knows"
    libraries["files"]["/packages/libnvjpeg.so.13"] = (13, 3, 2)
    libraries["loaded"]["libnvjpeg.so.12"] = (12, 4, 0)
    assert nvjpeg.loaded() == nvjpeg.found() == (12, 4, 0)
    assert not nvjpeg.decodes_regions()


def test_an_installation_for_cuda_13_brings_one_that_is_new_enough() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {one.name: one.specifier for one in map(Requirement, project["optional-dependencies"]["cuda13"])}
    assert "13.2" in wanted["nvidia-nvjpeg"] and "13.1.9" not in wanted["nvidia-nvjpeg"]


def test_the_path_of_the_environment_comes_before_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "nvidia"
    package.mkdir(parents=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/first::{tmp_path}/second")
    found = SimpleNamespace(submodule_search_locations=[str(package)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    packages = [package / "cu13/lib", package / "nvjpeg/lib"]
    assert nvjpeg._folders() == [tmp_path / "first", tmp_path / "second", *packages]


@pytest.mark.parametrize(("codec", "regions"), [("0.8.1.4", True), ("0.9.0.20", False), ("0.9.1.1", True), ("", True)])
def test_regions_are_not_asked_of_the_codec_that_crashes_on_them(
    libraries: dict[str, Libraries], monkeypatch: pytest.MonkeyPatch, codec: str, regions: bool
) -> None:
    libraries["loaded"]["libnvjpeg.so.13"] = (13, 3, 2)
    monkeypatch.setattr(nvjpeg, "codec_version", lambda: codec)
    assert nvjpeg.decodes_regions() is regions
    for wanted in (False, True):
        monkeypatch.setenv(nvjpeg.REGIONS, str(int(wanted)))
        assert nvjpeg.decodes_regions() is wanted


@pytest.mark.usefixtures("libraries")
def test_who_has_measured_sets_the_engines_load_and_whether_decoding_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (nvjpeg.engine_load(), nvjpeg.decoding_waits()) == (1.0, True)
    monkeypatch.setattr(nvjpeg, "found", lambda: (13, 3, 2))
    assert (nvjpeg.decoding_waits("NVIDIA H200"), nvjpeg.decoding_waits("NVIDIA H100 80GB HBM3")) == (False, True)
    monkeypatch.setattr(nvjpeg, "found", lambda: (13, 2, 9))
    assert nvjpeg.decoding_waits("NVIDIA H200")
    monkeypatch.setenv(nvjpeg.ENGINE_LOAD, "0.0")
    assert (nvjpeg.engine_load(), nvjpeg.decoding_waits()) == (0.0, False)
    monkeypatch.setenv(nvjpeg.WAITS, "1")
    assert nvjpeg.decoding_waits()


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("name", "value", "ask"),
    [
        (nvjpeg.REGIONS, "yes", nvjpeg.decodes_regions),
        (nvjpeg.WAITS, "", nvjpeg.decoding_waits),
        (nvjpeg.ENGINE_LOAD, "1.5", nvjpeg.engine_load),
        (nvjpeg.ENGINE_LOAD, "nan", nvjpeg.engine_load),
    ],
)
def test_a_setting_that_means_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, ask: Callable[[], object]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value!r}"):
        ask()
