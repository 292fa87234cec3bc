"""A loader that is asked from outside how it stands: who answers, for how long, and what stays behind (P7)."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from minato_gpu import DataLoader, notices
from minato_gpu.observe import asking, listening, sockets
from minato_gpu.observe.asking import JobState, NoAnswer, ask, ask_all
from minato_gpu.observe.sockets import PROTOCOL
from minato_gpu.threads import OwnThread
from tests.leaks import check_scenario, open_links
from tests.programs import Program
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")
NUMBERS: Any = range(32)


def _loader(**more: Any) -> Any:
    return DataLoader(NUMBERS, 4, **{"num_workers": 1, **more})


def _sockets() -> list[int]:
    """The processes that listen."""
    return [pid for pid, _ in sockets.found()]


def _begun(loader: Any) -> Iterator[Any]:
    """The rest of an epoch."""
    iterator: Iterator[Any] = iter(loader)
    next(iterator)
    return iterator


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_it_tells_how_every_loader_stands(runtime: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    first, second = _loader(worker_kind=kind), _loader(worker_kind=kind)
    iterators = [_begun(first), _begun(second)]
    found = ask(os.getpid())
    assert (found.pid, found.rank) == (os.getpid(), "3") and found.command
    assert [each.name for each in found.loaders] == ["range-1", "range-2"]
    assert [each.stats["samples_delivered"] for each in found.loaders] == [4, 4]
    (same,) = ask_all()
    assert isinstance(same, JobState) and same.loaders[0].stats["samples_expected"] == 32
    assert len(list(iterators.pop())) == len(list(iterators.pop())) == 7
    list(second)
    later = ask(os.getpid())
    assert [(each.epoch, each.stats["samples_delivered"]) for each in later.loaders] == [(0, 32), (1, 32)]
    assert later.loaders[0].at_s > found.loaders[0].at_s
    del first
    assert [each.name for each in ask(os.getpid()).loaders] == ["range-2"]
    third = _loader(worker_kind=kind)
    list(third)
    assert {each.name for each in ask(os.getpid()).loaders} == {"range-1", "range-2"}
    assert _sockets() == [os.getpid()]


def test_nothing_listens_without_workers_or_before_an_epoch(runtime: str) -> None:
    loaders = [_loader(), _loader(num_workers=0)]
    list(loaders[1])
    assert _sockets() == []
    with pytest.raises(NoAnswer, match="has no loader with workers at work, or has ended"):
        ask(os.getpid())
    assert list(ask_all()) == []


def _whole_epochs() -> None:
    loader = _loader(persistent_workers=True)
    for _ in range(2):
        assert len(list(loader)) == 8
    assert ask(os.getpid()).loaders[0].epoch == 1


def _left_early() -> None:
    for batch in _loader():
        assert len(batch) == 4 and ask(os.getpid()).loaders
        break


def _two_of_which_one_goes() -> None:
    one, two = _loader(), _loader(worker_kind="thread")
    list(one)
    list(two)
    del one
    assert len(ask(os.getpid()).loaders) == 1


def _copied() -> None:
    import copy

    loader = _loader()
    list(loader)
    other = copy.copy(loader)
    list(other)
    del loader
    assert len(ask(os.getpid()).loaders) == 1


@pytest.mark.parametrize("scenario", [_whole_epochs, _left_early, _two_of_which_one_goes, _copied])
def test_nothing_stays_behind(runtime: str, scenario: Any) -> None:
    check_scenario(scenario)
    assert _sockets() == []


def test_workers_do_not_hold_the_socket(runtime: str) -> None:
    """Of this loader, and of one that comes when the socket is there already; nor does the process that reads ahead."""
    first = _loader(persistent_workers=True)
    list(first)
    second = _loader(num_workers=2, on_worker_death="replace")
    iterator = _begun(second)
    inodes = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines() if runtime in line}
    assert inodes
    children = psutil.Process().children(recursive=True)
    assert len(children) >= 3
    for child in children:
        held = set(open_links(child.pid))
        assert held and not held & {f"socket:[{inode}]" for inode in inodes}, child
    assert len(list(iterator)) == 7


def _forked(work: Any) -> str:
    """What ``work`` returns in a process that was forked from this one, which does not clean up."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writes, str(work()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as told:
        said = told.read()
    os.waitpid(pid, 0)
    return said


def test_a_forked_process_does_not_answer_for_its_parent_but_for_itself(runtime: str) -> None:
    inherited = [_loader(worker_kind="thread")]
    list(inherited[0])

    def child() -> list[Any]:
        before = _sockets() == [os.getppid()]
        own = _loader(worker_kind="thread")
        list(own)
        inherited.clear()  # whose end is none of the loader that has its number here
        found = ask(os.getpid())
        del own
        return [before, found.pid == os.getpid(), len(found.loaders), _sockets() == [os.getppid()]]

    assert _forked(child) == "[True, True, 1, True]"
    assert ask(os.getpid()).loaders[0].stats["samples_delivered"] == 32


@contextmanager
def _job(runtime: str) -> Iterator[Program]:
    program = Program("tests.observe.watched_program", runtime)
    try:
        assert program.stdout.readline() == "trains\n"
        yield program
    finally:
        program.kill()
        program.close()


def test_a_job_that_ends_takes_its_socket_along(runtime: str) -> None:
    with _job(runtime) as program:
        assert ask(program.pid).loaders[0].stats["samples_expected"] == 64
        program.stdin.write("end\n")
        program.stdin.flush()
        assert program.wait() == 0
        assert _sockets() == []
        with pytest.raises(NoAnswer, match="or has ended"):
            ask(program.pid)


def test_a_killed_job_leaves_nothing(runtime: str) -> None:
    with _job(runtime) as program:
        program.kill()
        program.wait()
        assert wait_until(lambda: _sockets() == [])
        assert list(ask_all()) == []


def test_a_job_that_does_not_answer(runtime: str) -> None:
    with _job(runtime) as program:
        os.kill(program.pid, signal.SIGSTOP)
        with pytest.raises(NoAnswer, match=rf"process {program.pid} does not answer within 0\.05 seconds"):
            ask(program.pid, timeout=0.05)
        (silent,) = ask_all(timeout=0.05)
        assert isinstance(silent, NoAnswer)


@contextmanager
def _stranger(says: bytes) -> Iterator[int]:
    """Something else that listens, says this, and hangs up."""
    listens = sockets.listen()

    def speak() -> None:
        connection, _ = listens.accept()
        with connection, suppress(BrokenPipeError):  # who asked may have hung up
            connection.sendall(says)

    thread = threading.Thread(target=speak)
    thread.start()
    try:
        yield os.getpid()
    finally:
        thread.join()
        listens.close()


_FIRST = json.dumps({"protocol": PROTOCOL, "pid": 1, "command": "x"}).encode()


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"HTTP/1.0 400 Bad Request\r\n\r\n",
        b"\xff\xfe",
        b"[]",
        b"3",
        b'{"protocol": "another"}',
        _FIRST[:-5],
        _FIRST + b'\n{"loader": "a"}',
        _FIRST + b'\n{"loader": "a", "epoch": 0, "at_s": "soon", "stats": {}}',
        _FIRST + b'\n{"loader": "a", "epoch": 0, "at_s": 1, "stats": 3}',
    ],
)
def test_what_is_no_loader(runtime: str, says: bytes) -> None:
    with _stranger(says) as pid, pytest.raises(NoAnswer, match="is no loader of this version"):
        ask(pid)


def test_one_that_does_not_stop_speaking(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_LARGEST", 1000)
    with _stranger(b"x" * 3000) as pid, pytest.raises(NoAnswer, match="longer than 1000 bytes"):
        ask(pid)


def test_another_users_process_is_told_nothing(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = _loader(worker_kind="thread")
    list(loader)
    monkeypatch.setattr(sockets, "is_ours", lambda _: not OwnThread.is_current())  # who asks is, to itself
    with pytest.raises(NoAnswer, match="is no loader of this version"):
        ask(os.getpid())


def test_another_users_process_is_not_spoken_to(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever name it has given itself; the process that is meant is found beside it."""
    with _stranger(b"") as pid:
        monkeypatch.setattr(sockets, "is_ours", lambda _: False)
        assert list(ask_all()) == []
        with pytest.raises(NoAnswer, match="has no loader with workers at work"):
            ask(pid)


def test_the_kernel_says_whose_a_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair()
    with one, other:
        assert sockets.is_ours(one)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert not sockets.is_ours(one)


def test_names_that_are_not_ours_are_left_alone(runtime: str) -> None:
    for name in (f"{runtime}-{os.getuid()}", f"{runtime}-{os.getuid()}-x-1", f"{runtime}-{os.getuid() + 1}-1-1"):
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(f"\0{name}")
            other.listen()
            assert _sockets() == []


def test_who_hangs_up_or_does_not_read_harms_nobody(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_TIMEOUT_S", 0.05)
    loader = _loader(worker_kind="thread")
    list(loader)
    (_, name), *_none = sockets.found()
    for _ in range(3):
        sockets.connect(name, 5.0).close()
    monkeypatch.setattr(listening, "_command", lambda: "x" * (1 << 22))  # more than a socket holds
    with sockets.connect(name, 5.0) as reads_nothing:
        poll = select.poll()
        poll.register(reads_nothing, 0)  # when the other end has been closed
        assert poll.poll(30_000)
        monkeypatch.setattr(listening, "_TIMEOUT_S", 30.0)
        found = ask(os.getpid(), 30.0)
    assert len(found.command) == 1 << 22


def test_where_there_can_be_no_socket_that_is_said_and_training_goes_on(
    runtime: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused() -> Any:
        raise OSError("no sockets here")

    notices.say_once.cache_clear()
    monkeypatch.setattr(sockets, "listen", refused)
    loader = _loader()
    assert len(list(loader)) == len(list(loader)) == 8
    assert [record.message for record in caplog.records] == [
        "minato-gpu top cannot watch this process: no sockets here"
    ]


def test_a_loader_that_dies_in_a_thread_of_ours_waits_for_nobody(runtime: str) -> None:
    """The collector may run in the thread that answers, say."""
    kept = [_loader(worker_kind="thread")]
    list(kept[0])
    thread = OwnThread(target=kept.clear)
    thread.start()
    thread.join()
    assert wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("minato-")])
    assert _sockets() == []


def test_nothing_is_read_from_whoever_asks(runtime: str) -> None:
    loader = _loader(worker_kind="thread")
    list(loader)
    ((_, name),) = sockets.found()
    with sockets.connect(name, 5.0) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert PROTOCOL.encode() in connection.recv(1 << 16)
