"""The frame of every benchmark: turns, a row for each loader, the document, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from click.testing import CliRunner

from benchmarks import report
from benchmarks.isolate import MeasurementError
from benchmarks.peers import Loader
from benchmarks.turns import measured_rows, present


class _Loader(Loader):
    package = "torch"


class _Absent(Loader):
    package = "no_such_package"


class _Run(NamedTuple):
    samples_per_s: float
    wait_ms: float
    settings: str = "not a figure"


_FAST, _DEAD, _ABSENT = _Loader("fast"), _Loader("dead"), _Absent("absent")
_order: list[str] = []


@report.benchmark("storage", 3, shown=("loader", "samples_per_s"), batch_size=8)
@report.loader_option
def main(quick: bool, repetitions: int, wanted: tuple[str, ...]) -> Iterable[dict[str, Any]]:
    def measure(loader: Loader) -> _Run:
        _order.append(loader.name)
        if loader is _DEAD:
            raise MeasurementError("it died")
        return _Run(10.0 * len(_order), 5.0)

    loaders = present((_FAST, _DEAD, _ABSENT), wanted)
    return measured_rows("a case", loaders, repetitions, measure)[0]


def test_a_loader_that_fails_is_a_row_and_an_exit_status(tmp_path: Path) -> None:
    _order.clear()
    path = tmp_path / "left" / "storage.json"
    done = CliRunner().invoke(main, ["--json", str(path)])
    assert done.exit_code == 1
    document = json.loads(path.read_text(encoding="utf-8"))
    assert _order == ["fast", "dead"] * 3, "loaders take turns"
    fast, dead = document["rows"]
    assert (fast["samples_per_s"], fast["samples_per_s_min"], fast["samples_per_s_spread"]) == (30.0, 10.0, 20.0)
    assert fast["wait_ms"] == 5.0 and "wait_spread_ms" in fast and "settings" not in fast and fast["repetitions"] == 3
    assert dead == {"case": "a case", "loader": "dead", "order": "in order", "repetitions": 0, "error": "it died"}
    settings = document["settings"]
    assert settings["batch_size"] == 8 and settings["repetitions"] == 3 and settings["not_installed"] == ["absent"]


def test_only_what_is_asked_for_is_measured() -> None:
    _order.clear()
    done = CliRunner().invoke(main, ["--quick", "--loader", "fast"])
    assert done.exit_code == 0 and _order == ["fast"] and "samples/s" in done.stdout
    done = CliRunner().invoke(main, ["--loader", "slow"])
    assert done.exit_code == 2 and "no loader is called 'slow'; there are: fast; dead; absent" in done.output
