"""``minato-gpu analyze``: what it says and leaves, how mistakes end, and that a script's process ends in time."""

from __future__ import annotations

import json
import os
import re
import select
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from minato_gpu.lab.analysis import predict, script, tables
from minato_gpu.lab.analysis.profile import Phase
from minato_gpu.lab.analysis.script import ScriptOrder
from minato_gpu.lab.cli import main
from tests.lab.analysis.conftest import a_profile
from tests.lab.analysis.scripts import data, written
from tests.support.programs import Program


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def _analyze(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["analyze", *arguments])
    assert result.exit_code == code, result.output
    return result


def test_a_script_is_analysed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minato_gpu.lab.analysis.script._GRACE_S", 100.0)  # a busy machine is no script that hangs
    script = written(tmp_path, "loader = DataLoader(Files(sys.argv[1]), 4, num_workers=1)\nwhile True: train(loader)")
    left = tmp_path / "out.json"
    result = _analyze("--seconds", "1", "--json", str(left), script, data(tmp_path / "data"))
    assert "side effects" in result.output
    for said in ("where an epoch's time goes", "preparation stall", "slowest samples", "what was measured"):
        assert said in result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())
    document: dict[str, Any] = json.loads(left.read_text())
    assert document["settings"]["script"] == script
    shares = [row["share"] for row in document["rows"] if row["share"] is not None]
    assert sum(shares) == pytest.approx(1.0)
    assert document["verdict"]["sentence"] in " ".join(result.output.split())
    assert document["profiles"][0]["samples"] == 64
    assert document["results"] == [
        {"rank": 0, "status": "complete", "message": "", "loaders": document["results"][0]["loaders"]}
    ]


@pytest.mark.usefixtures("forked")
@pytest.mark.timeout(240)
def test_other_settings_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "answer", partial(predict.answer, draws=1))  # as it is about what is said
    script = written(tmp_path, "loader = DataLoader(Files(sys.argv[1]), 4, num_workers=1)\nwhile True: train(loader)")
    left, report = tmp_path / "out.json", tmp_path / "new" / "out.html"
    given = ("--seconds", "1", "--verify", "--json", str(left), "--report", str(report))
    result = _analyze(*given, script, data(tmp_path / "data", 24))
    assert "for at most 2 s" in " ".join(result.output.split())
    assert all(len(line) <= 80 for line in result.output.splitlines())
    rows = json.loads(left.read_text())["whatif"]
    ran = [row for row in rows if "measured_s" in row]
    assert ran and all(row["measured_s"] > 0 and row["deviation"] > -1 for row in ran)
    assert all(row["verified"].startswith("run here" if row in ran else "not ") for row in rows)
    page = report.read_text(encoding="utf-8")
    assert "off by" in " ".join(result.output.split())
    for said in ("workers", "measured s", "not verifiable here", "run here"):
        assert said in page


NASTY = "/data/<script>alert(1)</script>.jpeg"


def test_the_page_needs_nothing_else_and_quotes_what_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase = Phase((0.5, 1.0, 1.0, 1.5), 0.25)
    profile = a_profile(samples=32, phases=dict.fromkeys(("compute", "warm", "cold"), phase), slowest=((0.2, NASTY),))
    monkeypatch.setattr(script, "run", lambda order: script.Result("complete", 0, profile=profile))
    monkeypatch.setattr(tables, "answer", partial(predict.answer, draws=1))
    report = tmp_path / "out.html"
    _analyze("--report", str(report), written(tmp_path, "pass"))
    page = report.read_text(encoding="utf-8")
    assert "&lt;script&gt;alert" in page and not re.search("<script|<link|<img|href=|src=", page)
    for said in (
        "slowest samples",
        "storage latency, ms",
        "cache of this loader",
        "times faster",
        "as measured",
        "####",
    ):
        assert said in page


def test_several_ranks_verify_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    result = _analyze("--verify", written(tmp_path, "print('never')"), code=2)
    assert "one rank" in result.output and "never" not in result.output


@pytest.mark.usefixtures("forked")
def test_nothing_was_measured(tmp_path: Path) -> None:
    result = _analyze(written(tmp_path, "pass"), code=1)
    assert "nothing was measured: the script ended without iterating a torch.utils.data.DataLoader" in result.output


def test_too_few_batches_are_an_error_and_leave_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = script.Result("complete", 0, profile=a_profile())
    monkeypatch.setattr(script, "run", lambda order: found)
    left = tmp_path / "out.json"
    result = _analyze("--json", str(left), written(tmp_path, "pass"), code=1)
    assert "nothing was measured: Too few batches were seen" in " ".join(result.output.split())
    assert json.loads(left.read_text())["profiles"]


@pytest.mark.usefixtures("forked")
def test_options_after_the_script_are_the_scripts_and_that_is_said(tmp_path: Path) -> None:
    result = _analyze(written(tmp_path, "pass"), "--epochs", "3", "--report=out.html", code=1)
    assert "--report comes after the script, so the script gets it" in " ".join(result.output.split())
    assert "--epochs" not in result.output


def test_mistakes_are_said_in_one_line() -> None:
    result = _analyze("missing.py", code=2)
    assert "there is no script 'missing.py'" in result.output and result.output.count("Error: ") == 1


# --- the script's process -------------------------------------------------------------------------------------------


def test_a_script_that_never_asks_for_a_batch_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "START_S", 0.0)
    order = ScriptOrder(written(tmp_path, "import threading\nthreading.Event().wait()"), (), str(tmp_path), 1.0)
    assert script.run(order).profile is None


@pytest.mark.usefixtures("forked")
def test_what_a_script_leaves_behind_is_ended(tmp_path: Path) -> None:
    body = """
import subprocess
server = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
open(sys.argv[1], "w").write(str(server.pid))
"""
    left = tmp_path / "pid"
    result = script.run(ScriptOrder(written(tmp_path, body), (str(left),), str(tmp_path), 1.0))
    assert result == script.Result("ended", 0)
    try:
        server = os.pidfd_open(int(left.read_text()))
    except ProcessLookupError:
        return  # gone already
    select.select([server], [], [])  # until it has ended; the test's time limit is the only one
    os.close(server)


@pytest.mark.usefixtures("forked")
def test_a_script_that_is_killed(tmp_path: Path) -> None:
    body = """
import signal
train(loader := DataLoader(Files(sys.argv[1]), 4))
os.kill(os.getpid(), signal.SIGKILL)
"""
    order = ScriptOrder(written(tmp_path, body), (data(tmp_path / "data"),), str(tmp_path), 1000.0)
    result = script.run(order)
    assert (result.status, result.message) == ("died", "it was ended by signal 9")
    assert result.profile is not None and "compute" in result.profile.phases


def test_ranks_take_as_many_batches(tmp_path: Path) -> None:
    body = """
loader, count = DataLoader(Files(sys.argv[1]), 4, num_workers=1), 0
try:
    while True:
        for batch in loader:
            count += 1
            if sys.argv[2] == "1":
                [number ** 0.5 for number in range(20_000)]  # a slower step
finally:
    print(count)
"""
    path, folder = written(tmp_path, body), data(tmp_path / "data")
    orders = [ScriptOrder(path, (folder, str(rank)), str(tmp_path), 2.0, rank=rank, ranks=2) for rank in range(2)]
    programs = [Program("minato_gpu.lab.analysis.child", order.text(), at_once=True) for order in orders]
    counts = [json.loads(program.communicate()[0]) for program in programs]
    assert counts[0] == counts[1] > 0
    results = script.others(tmp_path, range(2))
    assert [result.status for result in results] == ["complete", "complete"]
    assert [result.profile.rank for result in results if result.profile is not None] == [0, 1]
