"""The folder of sockets: nobody else's, whatever others have put there."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from minato_gpu.memory.private_folder import FolderRefused, PrivateFolder, folder_path, is_ours


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where anybody may make folders."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def folder(temporary: Path) -> Iterator[PrivateFolder]:
    opened = PrivateFolder()
    yield opened
    opened.close()


def test_where_it_is(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fallback = temporary / f"minato-gpu-{os.getuid()}"
    assert folder_path() == fallback
    runtime = temporary / "run"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert folder_path() == fallback  # there is none
    runtime.mkdir(mode=0o700)
    assert folder_path() == runtime / "minato-gpu"
    runtime.chmod(0o750)
    assert folder_path() == fallback
    runtime.chmod(0o700)
    link = temporary / "link"
    link.symlink_to(runtime)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(link))
    assert folder_path() == fallback
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert folder_path() == temporary / "minato-gpu-12345"


def test_it_is_made_for_its_user_alone(folder: PrivateFolder) -> None:
    assert folder.path.stat().st_mode & 0o777 == 0o700
    again = PrivateFolder()
    assert again.path == folder.path
    again.close()
    again.close()


def _linked(path: Path) -> None:
    path.with_name("elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.with_name("elsewhere"))


def _open(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_linked, "is a link, or no folder"),
        (Path.touch, "is a link, or no folder"),
        (_open, r"lets others in \(mode 0755\)"),
    ],
)
def test_what_others_could_have_made_is_refused(temporary: Path, make: object, said: str) -> None:
    assert callable(make)
    make(folder_path())
    with pytest.raises(FolderRefused, match=said):
        PrivateFolder()


def test_another_users_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = temporary / "minato-gpu-12345"
    path.mkdir(mode=0o700)
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(FolderRefused, match=rf"belongs to another user \(uid {own}\)"):
        PrivateFolder()


def test_a_socket_is_found_whatever_the_length_of_the_path(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = temporary / ("d" * 200)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = PrivateFolder()
    listening = folder.listen(os.getpid())
    for name in ("12a", "notes.txt", "²"):  # are no process's
        (folder.path / name).touch()
    assert folder.pids() == [os.getpid()]
    with folder.connect(os.getpid(), 5.0) as connection:
        assert is_ours(connection)
    listening.close()
    folder.remove(os.getpid())
    assert folder.pids() == []
    folder.close()


def test_another_users_process_is_not_spoken_to(folder: PrivateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel says at both ends: here the test is another user all of a sudden."""
    with folder.listen(os.getpid()) as listening:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(FolderRefused, match="is another user's"):
            folder.connect(os.getpid(), 5.0)
        accepted, _ = listening.accept()
        with accepted:
            assert not is_ours(accepted)


def test_one_that_answers_stays_and_so_does_that_of_a_process_that_lives(folder: PrivateFolder) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    pid = ended.pid
    with folder.listen(pid):
        folder.remove_stale(pid)
        assert folder.pids() == [pid]
        with pytest.raises(OSError, match="already in use"):
            folder.listen(pid)  # another container's, which has a process of that number
    folder.listen(os.getppid()).close()
    folder.remove_stale(os.getppid())
    assert folder.pids() == sorted([pid, os.getppid()])


def test_what_stands_in_the_way_of_its_own_name_goes(folder: PrivateFolder) -> None:
    folder.listen(os.getpid()).close()
    with folder.listen(os.getpid()) as listening:
        assert listening.fileno() >= 0 and folder.pids() == [os.getpid()]
