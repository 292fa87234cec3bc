"""Asks a training process how its loaders stand, on the socket that observe/stats_socket.py listens on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from minato_gpu.memory.private_folder import PrivateFolder
from minato_gpu.observe.stats_socket import PROTOCOL
from minato_gpu.samples import JSON

TIMEOUT_S = 5.0


class NoAnswer(Exception):
    """A process could not be asked, or no loader of this version answered. The message says why."""


class LoaderState(NamedTuple):
    """A loader's state at ``at_s`` (seconds, of that process's own clock)."""

    name: str
    epoch: int
    at_s: float
    stats: dict[str, JSON]


class JobState(NamedTuple):
    """The states of a process's loaders."""

    pid: int
    command: str  # command line, without the interpreter
    rank: str | None  # of a distributed job; None: it is none
    loaders: list[LoaderState]


def ask(pid: int, timeout: float = TIMEOUT_S) -> JobState:
    """Asks process ``pid``, and waits for each piece of its answer ``timeout`` seconds at most. Raises NoAnswer."""
    folder = _folder()
    try:
        return _asked(folder, pid, timeout)
    finally:
        folder.close()


def ask_all(timeout: float = TIMEOUT_S) -> Iterator[JobState | NoAnswer]:
    """Asks every process of this user that listens; yields its answer, or why it gave none.

    Sockets that killed processes have left are removed. Raises NoAnswer where no process can be asked at all.
    """
    folder = _folder()
    try:
        for pid in folder.pids():
            folder.remove_stale(pid)
        for pid in folder.pids():
            try:
                yield _asked(folder, pid, timeout)
            except NoAnswer as error:
                yield error
    finally:
        folder.close()


def _folder() -> PrivateFolder:
    try:
        return PrivateFolder()
    except OSError as error:
        raise NoAnswer(f"no process can be asked: {error}") from error


def _asked(folder: PrivateFolder, pid: int, timeout: float) -> JobState:
    try:
        with folder.connect(pid, timeout) as connection, connection.makefile("rb") as stream:
            answer = stream.read()
        if not answer:  # it was killed as it was asked
            raise ConnectionResetError
    except (FileNotFoundError, ConnectionError) as error:
        folder.remove_stale(pid)
        raise NoAnswer(
            f"process {pid} has no loader with workers at work, or has ended (nothing listens in {folder.path})"
        ) from error
    except TimeoutError as error:
        raise NoAnswer(f"process {pid} does not answer within {timeout:g} seconds") from error
    except OSError as error:
        raise NoAnswer(f"process {pid} cannot be asked: {error}") from error
    try:
        return _parsed(answer)
    except (ValueError, KeyError, TypeError) as error:
        raise NoAnswer(f"what answers for process {pid} in {folder.path} is no loader of this version") from error


def _parsed(answer: bytes) -> JobState:
    """Parses an answer. Raises ValueError, KeyError or TypeError if it is not one."""
    first, *lines = map(json.loads, answer.decode().splitlines())
    if first["protocol"] != PROTOCOL:
        raise ValueError
    loaders = [_loader(line) for line in lines]
    return JobState(int(first["pid"]), str(first["command"]), first.get("rank"), loaders)


def _loader(line: dict[str, Any]) -> LoaderState:
    stats: dict[str, JSON] = dict(line["stats"])
    return LoaderState(str(line["loader"]), int(line["epoch"]), float(line["at_s"]), stats)
