"""``minato-gpu cache``: what it says of a directory, and what it does to one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from minato_gpu.cli import main
from minato_gpu.sources.disk.tier import DiskTier
from tests.sources.disk.content import BUDGET, SEGMENT, Elsewhere, content, disk_bytes, held, keep, segments


def _cache(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["cache", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout if "--json" in arguments else result.output


def _row(*arguments: str, code: int = 0) -> dict[str, Any]:
    rows: list[dict[str, Any]] = json.loads(_cache(*arguments, "--json", "-", code=code))["rows"]
    return rows[0]


def _filled(path: Path) -> str:
    tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    keep(tier, *range(40))
    tier.close()
    return str(path)


def test_it_shows_what_there_is(tmp_path: Path) -> None:
    path = _filled(tmp_path / "cache")
    row = _row(path)
    assert (row["entries"], row["content_bytes"]) == (40, 40 * 50_000)
    assert disk_bytes(Path(path)) <= row["disk_bytes"] <= 4 << 20
    assert 0 <= row["newest_s"] <= row["oldest_s"]
    assert "2,000,000" in _cache(path)


def test_it_verifies(tmp_path: Path) -> None:
    path = _filled(tmp_path / "cache")
    assert _row(path, "--verify")["corrupt"] == 0
    with segments(Path(path))[0].open("r+b") as file:
        file.seek(100_000)
        file.write(b"spoilt")
    assert "1 copies were damaged" in _cache(path, "--verify", code=1)
    assert _row(path, "--verify")["entries"] == 39


def test_it_empties(tmp_path: Path) -> None:
    path = _filled(tmp_path / "cache")
    assert _row(path, "--empty") == {"entries": 0, "in_use": False}
    assert disk_bytes(Path(path)) <= 64 << 10
    assert "is no cache" in _cache(path, code=1)
    assert _filled(Path(path)) and _row(path)["entries"] == 40


def test_it_empties_one_that_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    emptying = Elsewhere(lambda: _cache(str(path), "--empty"))
    tier = DiskTier(path, BUDGET, segment_bytes=SEGMENT)
    keep(tier, *range(40))
    assert emptying.succeeds()
    assert held(tier, 1) is None and keep(tier, 1) == 1 and held(tier, 1) == content(1)
    tier.close()


def test_wrong_arguments_are_said(tmp_path: Path) -> None:
    assert "is no cache" in _cache(str(tmp_path), code=1)
    assert "is no cache" in _cache(str(tmp_path), "--empty", code=1)
    assert "does not exist" in _cache(str(tmp_path / "nothing"), code=2)
    assert "give one of them" in _cache(str(tmp_path), "--verify", "--empty", code=2)
