"""The script's process: it is ended in time, with what it has started, and ranks end their phases together."""

from __future__ import annotations

import json
import os
import select
from pathlib import Path

import pytest

from minato_gpu.analysis import running
from minato_gpu.analysis.order import Order, Result, result_of
from tests.analysis.scripts import data, written
from tests.support.programs import Program


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    result = Result("died", 3, "no space", None, ("loader 1",))
    assert result_of(tmp_path, 3) is None
    result.leave(tmp_path)
    assert result_of(tmp_path, 3) == result
    order = Order("train.py", ("--lr", "0.1"), str(tmp_path), 5.0, loader=2)
    assert Order.of(order.text()) == order


def test_a_script_that_never_asks_for_a_batch_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "START_S", 0.0)
    order = Order(written(tmp_path, "import threading\nthreading.Event().wait()"), (), str(tmp_path), 1.0)
    assert running.run(order).profile is None


@pytest.mark.usefixtures("forked")
def test_what_a_script_leaves_behind_is_ended(tmp_path: Path) -> None:
    body = """
import subprocess
server = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
open(sys.argv[1], "w").write(str(server.pid))
"""
    left = tmp_path / "pid"
    result = running.run(Order(written(tmp_path, body), (str(left),), str(tmp_path), 1.0))
    assert result == Result("ended", 0)
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
    order = Order(written(tmp_path, body), (data(tmp_path / "data"),), str(tmp_path), 1000.0)
    result = running.run(order)
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
    script, folder = written(tmp_path, body), data(tmp_path / "data")
    orders = [Order(script, (folder, str(rank)), str(tmp_path), 2.0, rank=rank, ranks=2) for rank in range(2)]
    programs = [Program("minato_gpu.analysis.child", order.text(), at_once=True) for order in orders]
    counts = [json.loads(program.communicate()[0]) for program in programs]
    assert counts[0] == counts[1] > 0
    results = running.others(tmp_path, range(2))
    assert [result.status for result in results] == ["complete", "complete"]
    assert [result.profile.rank for result in results if result.profile is not None] == [0, 1]
