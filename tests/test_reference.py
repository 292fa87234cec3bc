"""The manual's page of arguments, statistics and commands is what docstrings and the command line say, and complete."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchDataLoader

from minato_gpu import DataLoader
from tests.contracts.cached import Files, write_files
from tests.support import reference
from tests.support.device_batches import Fake, consume, fake
from tests.support.numbers import PIPELINE, Numbers

__all__ = ["fake"]

# These need servers or other loaders; tests of lanes and sources read their figures.
ELSEWHERE = {"nodes", "reads.peers", "reads.urls", "share"}
ONE_OF_SEVERAL = {"lanes", "stalls"}  # their keys are names of lanes, and of causes
LEAVES = {"causes"}


def test_the_page_is_up_to_date() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run python -m tests.support.reference"


def test_every_argument_is_there() -> None:
    own = inspect.signature(DataLoader).parameters.keys() - inspect.signature(TorchDataLoader).parameters.keys()
    told = set(re.findall(r"^- \*\*`(\w+)`\*\*", reference.page().partition("## What")[0], flags=re.MULTILINE))
    assert told == own | {"prefetch_factor"}
    assert reference.MORE.keys() <= told


def test_every_key_of_stats_is_there(tmp_path: Path, fake: Fake) -> None:
    pytest.importorskip("prometheus_client")
    files: Any = Files(write_files(tmp_path / "files"))
    (tmp_path / "files" / "7.bin").unlink()
    device = fake()
    cache: Any = {"cache": {"memory": "1MB", "disk": "100MB"}, "cache_dir": tmp_path / "cache"}
    loaders = [
        DataLoader(files, 4, num_workers=1, on_error="skip", metrics_port=0, max_workers=2, **cache),
        DataLoader(Numbers(), 8, num_workers=1, pipeline=PIPELINE, device="cuda", lanes=("cpu", "device")),
    ]
    for batch in loaders[0]:
        del batch
    consume([device], loaders[1])
    known = reference.statistics()
    seen = {found for loader in loaders for found in keys("", loader.stats())}
    assert {key for key in seen if not _is_documented(key, known)} == set()
    entries = {entry for entry in known for key in seen if f"{key}.".startswith(f"{entry}.")}
    assert known.keys() - entries == ELSEWHERE


def keys(path: str, value: Any) -> Iterator[str]:
    """Dotted paths of a value of ``stats()``, with a star for names that depend on the run."""
    if isinstance(value, dict) and path.rpartition(".")[2] not in LEAVES and (value or not path):
        for name, part in value.items():
            yield from keys(f"{path}.{'*' if path in ONE_OF_SEVERAL else name}".removeprefix("."), part)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from (key for each in value for key in keys(path, each))
    elif path not in ONE_OF_SEVERAL:
        yield path


def _is_documented(key: str, entries: Mapping[str, str]) -> bool:
    """An entry is the key itself, or is what it begins with and names the rest in its text."""
    for entry, text in entries.items():
        rest = key.removeprefix(f"{entry}.")
        if key == entry or (rest != key and all(f"`{part}`" in text for part in rest.split("."))):
            return True
    return False
