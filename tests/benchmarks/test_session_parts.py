"""Loaders of a GPU session take turns: which are tuned, run, and left out, as far as time goes."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks import gpu_session
from benchmarks.gpu_session import PARTS, Part
from benchmarks.isolate import MeasurementError, isolated
from benchmarks.session import loaders, parts
from benchmarks.session.dali import DaliGpu
from benchmarks.session.measure import Run
from benchmarks.session.record import NO_TIME, Record, Row, Rows
from benchmarks.session.settings import Request, Settings

ABOUT = {"benchmark": "gpu_session", "settings": {"commit": "abc", "quick": True}, "machine": {"gpus": ["H"]}}


def settings(tmp_path: Path) -> Settings:
    return Settings.usual("cpu", tmp_path, quick=True)


def test_a_peer_that_is_not_installed_says_so(tmp_path: Path) -> None:
    asked = Request(settings(tmp_path), [], time.perf_counter() + 60)
    absent = replace(DaliGpu("dali", 1), package="nvidia.no_such_package")
    (row,) = parts._turns(asked, [[absent]], "mixed", "empty", _never)
    assert row["name"] == "dali" and row["missing"] == "nvidia.no_such_package is not installed"
    assert "error" not in row


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("it was run")


@pytest.mark.parametrize("quick", [True, False])
def test_all_that_is_tried_can_be_tried(quick: bool, tmp_path: Path) -> None:
    bases: dict[str, Any] = {"hybrid": parts.hybrid(settings(tmp_path)), **loaders.peers(settings(tmp_path))}
    for name, changes in loaders.changes(quick=quick).items():
        for change in changes:
            assert parts.changed(bases[name], {**bases[name].settings(), **change}) != bases[name]


def ran(rate: float, **more: Any) -> Run:
    """A run of 100 samples."""
    return Run(100, 100 / rate, 1.0, [0.25], [0.5], **more)


def test_tuning_keeps_what_is_faster_and_gives_everybody_as_many_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[str, dict[str, Any]]] = []

    def run(asked: Request, contender: Any, *rest: Any) -> Run:
        tried.append((contender.name, contender.settings()))
        if contender.name == "hybrid":
            return ran(1.0 + contender.workers)
        if contender.hw_decoder_load == 0.0:
            raise MeasurementError("no such engine")
        return ran(1.0 + (contender.threads == 8) + 4.0 * (contender.prefetch == 3 and contender.threads == 8))

    changes = {
        "dali": ({"threads": 8}, {"hw_decoder_load": 0.0}, {"prefetch": 3}, {"exec_dynamic": False}),
        "hybrid": ({"workers": 7},),
    }
    monkeypatch.setattr(loaders, "peers", lambda settings: {"dali": DaliGpu("dali", 16)})
    monkeypatch.setattr(loaders, "changes", lambda quick: changes)
    monkeypatch.setattr(loaders, "available", lambda contender: True)
    monkeypatch.setattr(parts, "_run", run)
    told = [*parts.tune(Request(settings(tmp_path), [], time.perf_counter() + 600))]
    assert [name for name, _ in tried] == ["hybrid", "dali", "hybrid", "dali", "dali", "dali", "dali"]
    last = {row["name"]: row for row in told}
    assert [one.get("samples_per_s") for one in last["dali"]["tried"]] == [1.0, 2.0, None, 6.0, 6.0]
    assert last["dali"]["tried"][2]["error"] == "no such engine"
    assert last["dali"]["loader_settings"]["prefetch"] == 3 and last["dali"]["samples_per_s"] == 6.0
    assert last["hybrid"]["loader_settings"]["workers"] == 7
    rows = [{"case": "tune", **row} for row in last.values()]
    asked = Request(settings(tmp_path), rows, time.perf_counter() + 600)
    assert [one.workers for one in parts.chosen_ours(asked)] == [7, 7, 7]
    (dali,) = parts.chosen_peers(asked)
    assert dali.settings() == last["dali"]["loader_settings"]


def test_a_peer_that_was_found_to_be_slow_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bases = {name: DaliGpu(name, 2) for name in ("slow", "fast", "untuned")}
    monkeypatch.setattr(loaders, "peers", lambda settings: bases)
    monkeypatch.setattr(parts, "_run", lambda *_: ran(5.0))
    tuned: Rows = [
        {
            "case": "tune",
            "name": name,
            "samples_per_s": rate,
            "loader_settings": bases[name].settings(),
            "tried": [{}, {}],
        }
        for name, rate in (("slow", 4.0), ("fast", 9.0))
    ]
    usual = replace(settings(tmp_path), quick=False, repetitions=1)
    rows = {row["name"]: row for row in parts.rates(Request(usual, tuned, time.perf_counter() + 600))}
    assert "less than" in rows["slow"]["missing"] and list(rows)[1:3] == ["hybrid", "fast"]
    tries = {name: row["tries"] for name, row in rows.items() if "missing" not in row}
    assert tries == {"hybrid": 0, "fast": 2, "cpu": 0, "device": 0, "untuned": 0}


def test_claims_have_two_repetitions_before_others_have_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran_: list[str] = []

    def run(request: Request, contender: Any, *rest: Any) -> Run:
        ran_.append(contender.name)
        return ran(5.0)

    monkeypatch.setattr(loaders, "peers", lambda settings: {name: DaliGpu(name, 2) for name in ("a", "b")})
    monkeypatch.setattr(parts, "_run", run)
    usual = replace(settings(tmp_path), repetitions=3)
    assert [*parts.rates(Request(usual, [], time.perf_counter() + 600))]
    first = ["hybrid", "a", "cpu", "device"]
    assert ran_ == [*first, *first, "b", *first, "b"]
    ran_.clear()
    assert [*parts.cores(Request(usual, [], time.perf_counter() + 600))]
    assert ran_ == ["hybrid", "hybrid", "a", "a", "cpu", "cpu", "b", "b"], "on four cores and on eight"


def test_no_run_begins_without_time_for_it(tmp_path: Path) -> None:
    """As one as long as the longest so far; and one that has failed is not run again."""
    now = time.perf_counter()
    ours = loaders.ours(1)
    asked = Request(settings(tmp_path), [], now + 1000)

    def run(contender: loaders.Contender) -> Run:
        if contender.name == "device":
            raise MeasurementError("one\ntwo")
        runs.append(contender.name)
        if len(runs) == 3:
            object.__setattr__(asked, "deadline", now)
        return ran(7.0)

    runs: list[str] = []
    rows = [*parts._turns(asked, [ours] * 5, "mixed", "empty", run)]
    assert runs == ["cpu", "hybrid", "cpu"]
    assert [(row["name"], row.get("repetitions"), row.get("error")) for row in rows] == [
        *(("cpu", 1, None), ("device", None, "one\ntwo"), ("hybrid", 1, None), ("cpu", 2, None))
    ]
    late = [*parts._turns(asked, [ours], "mixed", "empty", _never)]
    assert [row["missing"] for row in late] == [NO_TIME] * 3


# --- what is known is written at once, and a later command goes on with it; time is shared out ------------------------


def rows_of(monkeypatch: pytest.MonkeyPatch, **parts_: Callable[[Request], Iterator[Row]]) -> None:
    """Parts of the session that are these functions."""
    monkeypatch.setattr(gpu_session, "isolated", lambda function, *rest, **options: function(*rest))
    for name, run in parts_.items():
        monkeypatch.setitem(PARTS, name, replace(PARTS[name], run=run))


def test_a_row_is_written_when_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record.begin(tmp_path / "session.json", ABOUT)
    seen: list[Rows] = []

    def rates(asked: Request) -> Iterator[Row]:
        yield {"name": "hybrid", "samples_per_s": 1.0}
        seen.append(Record.read(tmp_path / "session.rows.jsonl").rows())
        yield {"name": "hybrid", "samples_per_s": 2.0}
        yield {"name": "dali", "missing": NO_TIME}

    def parity_(asked: Request) -> Iterator[Row]:
        seen.append([dict(row) for row in asked.rows])
        yield {"name": "p", "passed": True}
        raise MeasurementError("one\nand two")

    rows_of(monkeypatch, rates=rates, parity=parity_)
    content = gpu_session.session(settings(tmp_path), ["rates", "parity"], record, time.perf_counter() + 60)
    assert seen[0] == [{"case": "rates", "name": "hybrid", "samples_per_s": 1.0}]
    assert [(row["name"], row.get("samples_per_s")) for row in seen[1]] == [("hybrid", 2.0), ("dali", None)]
    told = {(row["case"], row["name"]): row for row in content["rows"]}
    assert list(told) == [("rates", "hybrid"), ("rates", "dali"), ("parity", "p"), ("parity", "parity")]
    assert told["parity", "parity"]["error"] == "one\nand two"
    assert json.loads(record.path.read_text(encoding="utf-8"))["rows"] == content["rows"]
    assert record.complete() == set(), "there was no time for one, and an error of the other"


def test_a_later_command_goes_on_with_what_an_earlier_one_knew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with what the earlier one was at as its machine went away, and in another file."""
    first = Record.begin(tmp_path / "first.json", ABOUT)
    tuned = {"case": "tune", "name": "dali", "samples_per_s": 9.0, "loader_settings": {"threads": 3}}
    first.add(tuned, {"part": "tune", "complete": True})
    with first.path.with_suffix(".rows.jsonl").open("a", encoding="utf-8") as file:
        file.write('\n{"case": "rates", "na')
    first.add({"part": "rates", "complete": False, "error": "died"})
    assert gpu_session._begun(None, first.path, settings(tmp_path), ABOUT).complete() == {"tune"}
    record = gpu_session._begun(
        first.path.with_suffix(".rows.jsonl"), tmp_path / "out/b.json", settings(tmp_path), ABOUT
    )
    assert record.complete() == {"tune"} and record.rows()[0] == tuned
    assert [row.get("error") for row in record.rows() if row["case"] == "rates"] == ["died"]
    known: list[Any] = []

    def rates(asked: Request) -> Iterator[Row]:
        known.append(asked.row("tune", "dali"))
        yield {"name": "dali", "samples_per_s": 8.0}

    rows_of(monkeypatch, rates=rates)
    content = gpu_session.session(settings(tmp_path), ["rates"], record, time.perf_counter() + 60)
    assert known == [tuned] and record.complete() == {"tune", "rates"}
    assert [row.get("error") for row in content["rows"]] == [None, None], "the part has run again"


def test_figures_of_another_commit_are_not_gone_on_with(tmp_path: Path) -> None:
    Record.begin(tmp_path / "first.json", ABOUT)
    other = {**ABOUT, "settings": {"commit": "def", "quick": True}, "machine": {"gpus": ["B"]}}
    for resume, out in ((tmp_path / "first.json", None), (None, tmp_path / "first.json")):
        with pytest.raises(click.UsageError, match="commit, gpus differ"):
            gpu_session._begun(resume, out, settings(tmp_path), other)
    (tmp_path / "first.rows.jsonl").unlink()
    (tmp_path / "first.json").write_text(json.dumps({**ABOUT, "rows": [{"case": "tune", "name": "dali"}]}))
    for resume, out in ((tmp_path / "first.json", None), (None, tmp_path / "first.json")):
        again = gpu_session._begun(resume, out, settings(tmp_path), ABOUT)
        assert [row["name"] for row in again.rows()] == ["dali"], "the document alone will do"
    with pytest.raises(click.UsageError, match="is missing, or is none"):
        gpu_session._begun(tmp_path / "none.json", None, settings(tmp_path), ABOUT)


def test_a_row_without_figures_takes_no_place_of_one_with(tmp_path: Path) -> None:
    """A later command with less time knows less, not better; but a test that passed once may fail."""
    record = Record.begin(tmp_path / "session.json", ABOUT)
    known = {"case": "rates", "name": "dali", "samples_per_s": 9.0}
    passed = {"case": "tests", "name": "a.py", "passed": True}
    record.add(known, passed, {"case": "rates", "name": "dali", "missing": NO_TIME}, {**passed, "error": "one"})
    record.add({"case": "rates", "name": "dali", "error": "died"})
    assert record.rows() == [known, {**passed, "error": "one"}]
    record.add({**known, "samples_per_s": 8.0, "error": "in the last run"})
    assert record.rows()[0]["samples_per_s"] == 8.0


@pytest.mark.parametrize(
    ("row", "failed"),
    [
        ({"case": "rates", "name": "dali", "error": "no such engine"}, False),
        ({"case": "probe", "name": "regions", "passed": False, "error": "SIGSEGV"}, False),
        ({"case": "rates", "name": "rates", "error": "the part has died"}, True),
        ({"case": "parity", "name": "speech_recognition", "passed": False}, True),
        ({"case": "light", "name": "light", "error": "of an earlier command"}, False),
    ],
)
def test_a_command_fails_for_its_own_parts_and_not_for_what_they_found(row: Row, failed: bool) -> None:
    assert gpu_session._failed(row, ["probe", "rates", "parity"]) is failed


def test_the_time_is_shared_out_over_what_is_left() -> None:
    """What is worth most comes first, and is known within ten minutes of asking for a machine, which takes two."""
    names, left, known = list(PARTS), 480.0 - gpu_session.PHOTOGRAPHS_S, {}
    assert names[:5] == ["probe", "first", "tune", "rates", "training"] and PARTS["probe"].share_s <= 60.0
    for number, name in enumerate(names):
        share = gpu_session.share_of(names[number:], left)
        assert share <= left and share >= min(left, PARTS[name].share_s)
        left -= share
        known[name] = left
    assert known["training"] >= 0.0 and known["rates"] >= PARTS["training"].share_s
    assert left == pytest.approx(0.0), "all of it is used"
    plenty = gpu_session.share_of(["rates", "training"], 10_000.0)
    assert plenty == pytest.approx(10_000.0 * PARTS["rates"].share_s / (230.0)), "and more where there is more"


def test_a_part_is_not_begun_without_time_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_of(monkeypatch, rates=_never, memory=_never)
    record = Record.begin(tmp_path / "session.json", ABOUT)
    usual = replace(settings(tmp_path), quick=False)
    content = gpu_session.session(usual, ["rates", "memory"], record, time.perf_counter() + 20)
    assert [(row["case"], row["missing"]) for row in content["rows"]] == [("rates", NO_TIME), ("memory", NO_TIME)]
    assert record.complete() == set()


def _too_long(folder: Path) -> tuple[Rows, bool]:
    """A part with a measurement of its own that never ends: its rows, and whether the measurement has ended too."""
    note = folder / "pid"

    def for_ever() -> None:
        note.write_text(str(os.getpid()), encoding="ascii")
        time.sleep(600)

    def run(asked: Request) -> Iterator[Row]:
        yield {"name": "known"}
        isolated(for_ever, settle_s=0.0)

    gc.freeze()  # a fork looks for garbage before it begins
    PARTS["thread"], limit_s = Part(run, 1.0), gpu_session._UNWIND_S + 0.5
    record = Record.begin(folder / "session.json", ABOUT)
    while not note.exists():  # on a busy machine it takes a while until the measurement has begun
        chosen = Settings.usual("cpu", folder, quick=True)
        ended = gpu_session._part("thread", chosen, [], record, limit_s)
        record.add({"part": "thread", **ended})
        limit_s *= 2
    return record.rows(), not Path(f"/proc/{note.read_text(encoding='ascii')}").exists()


def test_a_part_that_takes_too_long_is_ended_with_all_it_runs(fresh: Executor, tmp_path: Path) -> None:
    (known, row), ended = fresh.submit(_too_long, tmp_path).result()
    assert known["name"] == "known" and "no result after" in row["error"]
    assert ended
