"""A loader that is asked from outside how it stands: who answers, for how long, and what stays behind (P7)."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from minato_gpu import DataLoader
from minato_gpu.lab.top import JobState, NoAnswer, ask, ask_all
from minato_gpu.memory.private_folder import PrivateFolder
from minato_gpu.observe import stats_socket
from tests.observe.conftest import training
from tests.support.concurrency import said_by_a_child
from tests.support.leaks import check_scenario, open_links
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_leaks")
NUMBERS: Any = range(32)


def _loader(**more: Any) -> Any:
    return DataLoader(NUMBERS, 4, **{"num_workers": 1, **more})


def _sockets(runtime: Path) -> list[str]:
    return [path.name for path in (runtime / "minato-gpu").glob("*")]


def _begun(loader: Any) -> Iterator[Any]:
    """The rest of an epoch."""
    iterator: Iterator[Any] = iter(loader)
    next(iterator)
    return iterator


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_it_tells_how_every_loader_stands(runtime: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert _sockets(runtime) == [str(os.getpid())]


def test_nothing_listens_without_workers_or_before_an_epoch(runtime: Path) -> None:
    loaders = [_loader(), _loader(num_workers=0)]
    list(loaders[1])
    assert not (runtime / "minato-gpu").exists()
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


@pytest.mark.parametrize("scenario", [_whole_epochs, _left_early])
def test_nothing_stays_behind(runtime: Path, scenario: Any) -> None:
    check_scenario(scenario)
    assert _sockets(runtime) == []


def test_workers_do_not_hold_the_socket(runtime: Path) -> None:
    """Of this loader, and of one that comes when the socket is there already; nor does the process that reads ahead."""
    first = _loader(persistent_workers=True)
    list(first)
    second = _loader(num_workers=2, on_worker_death="replace")
    iterator = _begun(second)
    sockets = Path("/proc/net/unix").read_text().splitlines()
    inodes = {line.split()[6] for line in sockets if line.endswith(f"/{os.getpid()}")}
    assert inodes
    children = psutil.Process().children(recursive=True)
    assert len(children) >= 3
    for child in children:
        held = set(open_links(child.pid))
        assert held and not held & {f"socket:[{inode}]" for inode in inodes}, child
        assert str(runtime / "minato-gpu") not in held
    assert len(list(iterator)) == 7


def test_a_forked_process_does_not_answer_for_its_parent_but_for_itself(runtime: Path) -> None:
    inherited = [_loader(worker_kind="thread")]
    list(inherited[0])

    def child() -> list[Any]:
        before = _sockets(runtime) == [str(os.getppid())]
        own = _loader(worker_kind="thread")
        list(own)
        inherited.clear()  # whose end is none of the loader that has its number here
        found = ask(os.getpid())
        del own
        return [before, found.pid == os.getpid(), len(found.loaders), _sockets(runtime) == [str(os.getppid())]]

    assert said_by_a_child(child) == [True, True, 1, True]
    assert ask(os.getpid()).loaders[0].stats["samples_delivered"] == 32


def test_a_job_that_ends_takes_its_socket_along(runtime: Path) -> None:
    with training(runtime) as (program,):
        assert ask(program.pid).loaders[0].stats["samples_expected"] == 64
        program.stdin.write("end\n")
        program.stdin.flush()
        assert program.wait() == 0
        assert _sockets(runtime) == []
        with pytest.raises(NoAnswer, match="or has ended"):
            ask(program.pid)


def test_what_a_killed_job_has_left_is_removed_by_the_next_who_looks(runtime: Path) -> None:
    with training(runtime) as (program,):
        program.kill()
        program.wait()
        assert _sockets(runtime) == [str(program.pid)]
        assert wait_until(lambda: not Path(f"/proc/{program.pid}").exists())
        assert list(ask_all()) == [] and _sockets(runtime) == []


def test_another_users_process_is_told_nothing(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = _loader(worker_kind="thread")
    list(loader)
    monkeypatch.setattr(stats_socket, "is_ours", lambda _: False)
    with pytest.raises(NoAnswer, match="or has ended"):
        ask(os.getpid())


def test_who_hangs_up_or_does_not_read_harms_nobody(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_socket, "_TIMEOUT_S", 0.05)
    loader = _loader(worker_kind="thread")
    list(loader)
    folder = PrivateFolder()
    for _ in range(3):
        folder.connect(os.getpid(), 5.0).close()
    monkeypatch.setattr(stats_socket, "_command", lambda: "x" * (1 << 22))  # more than a socket holds
    with folder.connect(os.getpid(), 5.0) as reads_nothing:
        poll = select.poll()
        poll.register(reads_nothing, 0)  # when the other end has been closed
        assert poll.poll(30_000)
        monkeypatch.setattr(stats_socket, "_TIMEOUT_S", 30.0)
        found = ask(os.getpid(), 30.0)
    assert len(found.command) == 1 << 22
    folder.close()


def test_a_folder_that_cannot_be_trusted_is_said_and_training_goes_on(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (runtime / "minato-gpu").symlink_to(runtime)
    loader = _loader()
    assert len(list(loader)) == len(list(loader)) == 8
    assert [record.message for record in caplog.records] == [
        f"minato-gpu top cannot watch this process: {runtime}/minato-gpu is a link, or no folder"
    ]
    with pytest.raises(NoAnswer, match=r"no process can be asked: .* is a link"):
        ask(os.getpid())
