"""Programs of the tests, each in a process of its own that begins with torch imported.

Importing torch takes seconds of a core, and many tests need a program that they can kill, interrupt, or start anew. So
one process for each process of pytest imports it once and forks every program. From there on a program is as one that
``python -m MODULE ARGUMENT...`` started: its own session, standard streams, arguments and generators, and it leaves
through the interpreter's own end; strings have other hashes than in this process. What else an interpreter reads at its
start needs a real one.

One of which only the results matter leaves ``at_once``: to take down an interpreter that has torch is a fifth of a
second of a core, half of it the kernel's, which copies pages so that what is in them can be freed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pickle
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_IMPORTED = (
    "torch.distributed",
    "torch.utils.data",
    "minato_gpu.loader",
    "tests.support.fake_device",
    "benchmarks.report",
)
_LARGEST = 1 << 17


class _Request(NamedTuple):
    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    at_once: bool


class Program:
    """One that runs: the part of ``subprocess.Popen`` that the tests use."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        terminal: int | None = None,
        at_once: bool = False,
    ) -> None:
        """Start ``module``; ``environment`` is added to this process's own. ``terminal``: a descriptor, taken for
        its three streams, in place of pipes. ``at_once``: where it ends well, what is registered for its end is done,
        streams are flushed, and that is all."""
        request = _Request(module, arguments, {**os.environ, **(environment or {})}, at_once)
        self._end, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = self._pipes() if terminal is None else [terminal] * 3
        socket.send_fds(_server(), [pickle.dumps(request)], [*given, told.fileno()])
        told.close()
        for fd in set(given):
            os.close(fd)
        self.returncode: int | None = None
        self.pid: int = pickle.loads(self._end.recv(_LARGEST))

    def _pipes(self) -> list[int]:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        ours_err, theirs_err = os.pipe()
        self.stdin: IO[str] = os.fdopen(ours_in, "w", encoding="utf-8")
        self.stdout: IO[str] = os.fdopen(ours_out, encoding="utf-8")
        self.stderr: IO[str] = os.fdopen(ours_err, encoding="utf-8")
        return [theirs_in, theirs_out, theirs_err]

    def poll(self) -> int | None:
        """The exit code once it has ended; negative: the signal that ended it."""
        return self._ended(0)

    def wait(self) -> int | None:
        """Wait until it has ended."""
        return self._ended(None)

    def _ended(self, timeout_ms: int | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._end, select.POLLIN)
            if poll.poll(timeout_ms):
                self.returncode = pickle.loads(self._end.recv(_LARGEST))
                self._end.close()
        return self.returncode

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self, given: str = "") -> tuple[str, str]:
        """Give it its input, and wait for its end; returns what it has said and its errors."""
        self.stdin.write(given)
        self.stdin.close()
        said: dict[int, list[bytes]] = {self.stdout.fileno(): [], self.stderr.fileno(): []}
        going_on = set(said)
        try:
            while going_on:
                for fd in select.select(going_on, [], [])[0]:
                    data = os.read(fd, _LARGEST)
                    said[fd].append(data)
                    if not data:
                        going_on.remove(fd)
        except BaseException:  # the test has run out of time
            self.kill()
            raise
        finally:
            self.close()
        output, errors = (b"".join(parts).decode() for parts in said.values())
        return output, errors

    def close(self) -> None:
        """Wait until it has ended, and let go of its streams."""
        self.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()


def run(module: str, *arguments: str, given: str = "", environment: Mapping[str, str] | None = None) -> str:
    """What the program says; it must end well, and leaves at once."""
    program = Program(module, *arguments, environment=environment, at_once=True)
    said, errors = program.communicate(given)
    assert program.returncode == 0, f"{module} {arguments} ended with {program.returncode}: {errors[-5000:]}"
    return said


@contextlib.contextmanager
def kept_free(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that the kernel gives to nobody meanwhile, and that a server may have which names it."""
    with socket.socket() as keeps:
        keeps.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do; it never listens
        keeps.bind((host, 0))
        yield int(keeps.getsockname()[1])


server_pids: list[int] = []
"""The process behind the programs, if one was needed: it lives as long as this one."""


RANKS = 2


def results_of_ranks(folder: Path, program: str, *arguments: str) -> list[dict[str, Any]]:
    """What each of two ranks of a program has written into the folder. They are told what torchrun, which takes long to
    start, would tell them."""
    with kept_free() as port:
        common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        of_each = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
        ranks = [Program(program, *arguments, environment=one, at_once=True) for one in of_each]
        for rank in ranks:
            _, errors = rank.communicate()
            assert rank.returncode == 0, errors[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]


@cache
def _server() -> socket.socket:
    """The end that requests go to. The process behind it ends when this one does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.programs", str(theirs.fileno())]
    environment = {**os.environ, "PYTHONHASHSEED": "random"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], start_new_session=True)
    process.returncode = 0  # nobody waits for it, which is no leak
    server_pids.append(process.pid)
    theirs.close()
    atexit.register(ours.close)
    return ours


# --- in the process that forks them ---------------------------------------------------------------------------------


def _serve(end: socket.socket) -> tuple[_Request, list[int]] | None:
    """Fork what is asked for, and tell of each its id and how it has ended. Returns in the programs, and at the end."""
    running: dict[int, tuple[int, socket.socket]] = {}
    poll = select.poll()
    poll.register(end, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != end.fileno():
                poll.unregister(fd)
                os.close(fd)
                pid, told = running.pop(fd)
                _tell(told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                told.close()
                continue
            data, fds, _, _ = socket.recv_fds(end, _LARGEST, 4)
            if not data:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            *streams, teller = fds
            told = socket.socket(fileno=teller)
            pid = os.fork()
            if pid == 0:
                for other, (_, teller_of) in running.items():
                    os.close(other)
                    teller_of.close()
                told.close()
                end.close()
                return pickle.loads(data), streams
            for stream in streams:
                os.close(stream)
            _tell(told, pid)
            descriptor = os.pidfd_open(pid)
            running[descriptor] = pid, told
            poll.register(descriptor, select.POLLIN)


def _tell(told: socket.socket, what: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody asks any more
        told.send(pickle.dumps(what))


def _become(request: _Request, streams: list[int]) -> None:
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request.environment)
    random.seed()
    sys.modules["numpy"].random.seed()
    warnings.resetwarnings()
    sys.argv = [request.module, *request.arguments]
    try:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        _leaves_at_once(request.at_once and error.code in (None, 0))
        raise
    _leaves_at_once(request.at_once)


_at_once = False


def _leaves_at_once(so: bool) -> None:
    global _at_once
    _at_once = so


def _leave() -> None:
    if _at_once:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
        os._exit(0)


if __name__ == "__main__":
    atexit.register(_leave)  # what is registered first is done last
    gc.disable()
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    gc.enable()
    become = _serve(socket.socket(fileno=int(sys.argv[1])))
    if become is None:
        _leaves_at_once(True)
    else:
        _become(*become)
