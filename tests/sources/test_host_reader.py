"""One reader process for several loaders: who has it, what becomes of it, and that each goes on alone without it."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from minato_gpu.engine import builder
from minato_gpu.memory.private_folder import PrivateFolder
from minato_gpu.sources import host_reader, shared_reader
from minato_gpu.sources.host_reader import PROTOCOL, Answer, name_of
from minato_gpu.sources.process import ReaderSettings
from minato_gpu.util.messages import say_once
from tests.contracts.cached import (
    PAGE,
    SAMPLES,
    Files,
    loader_of,
    of_tier,
    read,
    rows,
    sums,
    without_draws,
    write_files,
)
from tests.support.leaks import gone, open_links, stop
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")

NAME = name_of("one")
ALL = SAMPLES * PAGE
_HELLO = pickle.dumps(ReaderSettings())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's own, in which nothing stays."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(host_reader, "LINGER_S", 0.1)
    opened = PrivateFolder()
    opened.close()
    say_once.cache_clear()
    yield opened.path
    assert wait_until(lambda: not [path for path in opened.path.iterdir() if path.name.startswith("share")])


def shared(files: Path, cache: int | None = ALL, **more: Any) -> Any:
    return loader_of(Files(files), cache, share="one", **more)


def connected() -> socket.socket:
    """A connection to the reader process, on which nothing has been said."""
    opened = PrivateFolder()
    try:
        return opened.connect(NAME, 20.0, socket.SOCK_SEQPACKET)
    finally:
        opened.close()


def pid_of(loader: Any) -> int:
    pid: int = loader._session.readers._reader.pid
    return pid


def whole(batches: Any) -> list[Any]:
    """An epoch, in order of its keys."""
    return sorted(without_draws(rows(batches)))


@contextmanager
def elsewhere(work: Callable[[Callable[[object], object]], None]) -> Iterator[tuple[int, Callable[[], Any]]]:
    """A process that does this, its pid, and what it says next; killed in the end."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work(lambda said: os.write(theirs, pickle.dumps(said)))
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        yield pid, lambda: pickle.loads(os.read(ours, 1000))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ours)


def test_what_one_has_read_the_others_hit_and_nothing_stays(files: Path, folder: Path) -> None:
    one, two = shared(files), shared(files)
    assert whole(one) == whole(two) == sums(files)
    assert (read(one), of_tier(one)["hits"]) == (SAMPLES, 0)
    assert (read(two), of_tier(two)["hits"]) == (0, SAMPLES)
    pid = pid_of(one)
    assert pid == pid_of(two) and NAME in [path.name for path in folder.iterdir()]
    assert os.getsid(pid) not in (pid, os.getsid(0))
    kinds = ("/dev/null", "socket:", "/memfd:minato-fetched", "anon_inode:", str(folder))
    assert [link for link in open_links(pid) if not link.startswith(kinds)] == []
    del one, two
    assert wait_until(lambda: gone(pid))
    assert wait_until(lambda: list(folder.iterdir()) == [])


@pytest.mark.parametrize("happens", [signal.SIGKILL, signal.SIGSTOP])
def test_others_go_on_whatever_becomes_of_the_first(files: Path, happens: signal.Signals) -> None:
    def work(say: Callable[[object], object]) -> None:
        loader = shared(files)
        iterator = iter(loader)
        next(iterator)
        say(pid_of(loader))
        signal.pause()

    with elsewhere(work) as (pid, said):
        reader = said()
        loader = shared(files)
        iterator = iter(loader)
        got = [next(iterator)]
        os.kill(pid, happens) if happens is signal.SIGKILL else stop(pid)
        assert whole([*got, *iterator]) == sums(files)
        assert loader.stats()["reads"]["process"] == "runs" and pid_of(loader) == reader
        assert whole(loader) == sums(files) and read(loader) == 0


def test_the_reader_is_killed(files: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes on alone; the workers started next have another one, which reads all anew."""
    monkeypatch.setattr(builder, "READ_AHEAD", 0)  # or all might be read by then
    loaders = [shared(files, prefetch_factor=1), shared(files, prefetch_factor=1)]
    iterators = [iter(loader) for loader in loaders]
    got = [[next(iterator)] for iterator in iterators]
    killed = pid_of(loaders[0])
    os.kill(killed, signal.SIGKILL)
    assert wait_until(lambda: gone(killed))
    for loader, first, iterator in zip(loaders, got, iterators, strict=True):
        assert whole([*first, *iterator]) == sums(files)
        assert loader.stats()["reads"]["process"] == "lost"
    assert f"The reader process of share='one' (pid {killed}) has ended" in caplog.text
    del iterators, iterator
    assert [whole(loader) for loader in loaders] == [sums(files), sums(files)]
    assert pid_of(loaders[0]) == pid_of(loaders[1]) != killed
    assert sum(map(read, loaders)) == SAMPLES


def test_those_who_start_at_the_same_time_have_one(files: Path) -> None:
    go, start = os.pipe()

    def work(say: Callable[[object], object]) -> None:
        os.close(start)
        os.read(go, 1)
        loader = shared(files)
        assert whole(loader) == sums(files)
        say(pid_of(loader))
        signal.pause()

    with elsewhere(work) as (_, one), elsewhere(work) as (_, two), elsewhere(work) as (_, three):
        os.close(start)
        os.close(go)
        assert len({one(), two(), three()}) == 1


def test_the_first_budget_counts(files: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, two, none = shared(files, 20 * PAGE), shared(files), shared(files, None)
    for loader in (one, two, none, two):
        assert whole(loader) == sums(files)
        assert of_tier(loader)["budget_bytes"] == 20 * PAGE and of_tier(loader)["copies"] == 20
    text = f"cache is {20 * PAGE}, as the loader said that came first; that of this loader ({ALL}) counts for nothing"
    assert caplog.text.count(text) == 1


# --- alone -----------------------------------------------------------------------------------------------------------


def is_alone(loader: Any, files: Path, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """It delivers all, reads for itself, and says why."""
    assert whole(loader) == sums(files) and read(loader) == SAMPLES
    assert "share='one': this loader reads by a process of its own" in caplog.text and why in caplog.text
    assert not hasattr(loader._session.readers._reader, "pid")


def test_loaders_of_another_version_have_another_process(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = shared(files)
    with monkeypatch.context() as other:
        other.setattr(host_reader, "PROTOCOL", PROTOCOL + 1)
        one = shared(files)
        assert whole(one) == sums(files)
    assert whole(two) == sums(files) and pid_of(one) != pid_of(two)


def test_one_that_is_stopped_is_waited_for_once_and_said(
    files: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = shared(files)
    assert whole(one) == sums(files)
    stop(pid := pid_of(one))
    monkeypatch.setattr(shared_reader, "_PATIENCE_S", 0.1)
    try:
        is_alone(shared(files), files, caplog, "continue it with kill -CONT, or kill it")
    finally:
        os.kill(pid, signal.SIGCONT)
    del one
    assert wait_until(lambda: gone(pid))


def test_another_users_process_is_told_nothing(
    files: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_reader, "is_ours", lambda _: False)
    is_alone(shared(files), files, caplog, "")
    monkeypatch.undo()


def test_a_folder_that_cannot_be_trusted(files: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.chmod(0o755)
    is_alone(shared(files), files, caplog, "lets others in")
    folder.chmod(0o700)


def test_a_name_that_a_killed_one_has_left(files: Path) -> None:
    opened = PrivateFolder()
    opened.bind(NAME, socket.SOCK_SEQPACKET).close()
    opened.close()
    loader = shared(files)
    assert whole(loader) == sums(files) and pid_of(loader)


@pytest.mark.parametrize(
    "frames",
    [
        [b"noise"],
        [pickle.dumps(7)],
        [_HELLO, b"\0"],
        [_HELLO, os.urandom(100)],
        [_HELLO, pickle.dumps(("say", 1))],
        [_HELLO, pickle.dumps(("sing", 1, []))],
    ],
    ids=["noise", "other settings", "marker", "noise later", "short", "unknown"],
)
def test_who_sends_noise_is_dropped(files: Path, frames: list[bytes]) -> None:
    loader = shared(files)
    iterator = iter(loader)
    got = [next(iterator)]
    with connected() as noisy:
        for frame in frames:
            noisy.send(frame)
        answers = [noisy.recv(1000)] if len(frames) > 1 else []
        assert select.select([noisy], [], [], 20.0)[0] and noisy.recv(1000) == b""
    assert all(isinstance(pickle.loads(answer), Answer) for answer in answers)
    assert whole([*got, *iterator]) == sums(files)
    assert loader.stats()["reads"]["process"] == "runs"
