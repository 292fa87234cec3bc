"""The harness itself: a leak is found, a skipped GPU test fails where it must, a warning is an error, programs end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from multiprocessing import get_context
from multiprocessing.context import ForkContext, ForkServerContext
from pathlib import Path

import pytest

from tests.support.leaks import assert_no_leaks, leaks, take_snapshot
from tests.support.programs import ROOT, Program


def test_nothing_is_found_where_nothing_leaked() -> None:
    assert_no_leaks(take_snapshot(), native=True)


@pytest.mark.parametrize("context", [get_context("fork"), get_context("forkserver")], ids=["fork", "forkserver"])
def test_a_process_is_found_and_forgotten_once_it_ends(context: ForkContext | ForkServerContext) -> None:
    waits, says = context.Pipe()
    before = take_snapshot()
    process = context.Process(target=waits.recv)
    process.start()
    found = [leak for leak in leaks(before, descriptors=False) if leak.startswith("process")]
    says.send("end")
    process.join()
    process.close()
    assert len(found) == 1
    assert_no_leaks(before, descriptors=False)


def test_a_thread_is_found() -> None:
    before = take_snapshot()
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="forgotten")
    thread.start()
    found = leaks(before, descriptors=False)
    gate.set()
    thread.join()
    assert found == ["thread forgotten"]


@pytest.mark.parametrize("name", ["minato_harness_{pid}", "torch_{pid}_1_0"])
def test_shared_memory_is_found(name: str) -> None:
    before = take_snapshot()
    path = Path("/dev/shm") / name.format(pid=os.getpid())
    path.write_bytes(b"x")
    found = leaks(before)
    path.unlink()
    assert found == [f"shared memory {path.name}"]


def test_what_a_dead_process_was_sharing_by_pytorch_is_not_ours() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    before = take_snapshot()
    path = Path("/dev/shm") / f"torch_{gone.pid}_1_0"
    path.write_bytes(b"x")
    found = leaks(before)
    path.unlink()
    assert found == []


@pytest.mark.parametrize("kind", ["memfd", "pipe"])
def test_descriptors_are_found(kind: str) -> None:
    before = take_snapshot()
    opened = [os.memfd_create("minato_harness")] if kind == "memfd" else list(os.pipe())
    found = leaks(before)
    for number in opened:
        os.close(number)
    assert found == [f"{len(opened)} more descriptors of kind {kind}"]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_program_ends_as_one_of_the_shell_does(at_once: bool) -> None:
    program = Program("json.tool", "--compact", at_once=at_once)
    assert program.communicate('{"a": 1}') == ('{"a":1}\n', "")
    assert program.returncode == 0
    refused = Program("json.tool", at_once=at_once)
    _, errors = refused.communicate("not JSON")
    assert refused.returncode == 1 and "Expecting value" in errors


def test_a_program_that_is_killed_is_gone_and_one_that_runs_is_found() -> None:
    Program("json.tool").communicate("1")  # so that the process behind it runs
    before = take_snapshot()
    program = Program("json.tool")
    (found,) = [leak for leak in leaks(before) if leak.startswith("process")]
    assert found.startswith(f"process {program.pid}:")
    program.kill()
    program.close()
    assert program.returncode == -signal.SIGKILL
    assert_no_leaks(before)


def test_the_process_that_hands_tests_out_imports_no_torch() -> None:
    """It loads the conftest, and runs nothing."""
    subprocess.run([sys.executable, "-c", _DISTRIBUTING], check=True, cwd=ROOT)


_DISTRIBUTING = """
import sys
from unittest.mock import Mock
from tests import conftest
session = Mock()
session.config.pluginmanager.hasplugin = "dsession".__eq__
conftest.pytest_sessionstart(session)
sys.exit(session.config.pluginmanager.import_plugin.called or "torch" in sys.modules)
"""


_INNER = """
import warnings
import pytest

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_runs(device):
    if device == "cuda":
        pytest.skip("as if there were no GPU")

def test_warns():
    warnings.warn("said")
"""


@pytest.mark.parametrize("required", [False, True])
def test_gpu_option_and_warnings(tmp_path: Path, required: bool) -> None:
    inner = tmp_path / "test_inner.py"
    inner.write_text(_INNER)
    command = ["-q", "-p", "tests.conftest", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(inner)]
    said, _ = Program("pytest", *command, *(["--require-gpu"] if required else [])).communicate()
    outcome = said.strip().splitlines()[-1]
    assert "UserWarning: said" in said
    assert ("1 failed, 1 passed, 1 error" in outcome) if required else ("1 failed, 1 passed, 1 skipped" in outcome), (
        said
    )
