"""Agents of far lanes as processes of this host, whose clock may be another one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

import psutil

from minato_gpu.lanes.base import Report
from minato_gpu.lanes.contract import Progress
from minato_gpu.lanes.far import agent
from minato_gpu.lanes.produce import Job
from minato_gpu.sources.cluster_token import TOKEN
from tests.lanes.lanes import FORK

_AT_AGENT = "MINATO_GPU_TESTS_AT_AGENT"


def shifted(message: Any, seconds: float) -> Any:
    """The message, with its times as a clock shows them that is so far ahead."""
    if isinstance(message, Report):
        ends = None if message.ends is None else [end + seconds for end in message.ends]
        return message._replace(begin=message.begin + seconds, end=message.end + seconds, ends=ends)
    if isinstance(message, Progress):
        return Progress(tuple(replace(each, since=each.since + seconds) for each in message.at_work))
    return message


class _Ahead(agent.AgentSession):
    """A session whose clock is ``seconds`` ahead."""

    seconds = 0.0

    def _send(self, *head: Any, body: Any = ()) -> None:
        self._beaten = perf_counter()
        now = perf_counter() + self.seconds
        self._wire.send(*(shifted(each, self.seconds) for each in head), now, body=body)


def _run(told: Any, cores: int, job: Job | None, ahead_s: float, port: int) -> None:
    _Ahead.seconds = ahead_s
    os.environ[_AT_AGENT] = "yes"
    agent.AgentSession = _Ahead  # type: ignore[misc]
    if job is not None:
        agent.Shipment.unpack = lambda self: replace(job, lane=self.lane, num_workers=self.workers)  # type: ignore[method-assign]
    agent.serve("127.0.0.1", port, cores, told.send)


def is_at_agent() -> bool:
    """Whether this is a process of an agent."""
    return _AT_AGENT in os.environ


class AgentProcess:
    """An agent. ``job``: in the place of what loaders send, which need not be picklable then."""

    def __init__(self, cores: int = 1, *, job: Job | None = None, ahead_s: float = 0.0, port: int = 0) -> None:
        os.environ.setdefault(TOKEN, "a token of the tests")
        here, there = FORK.Pipe(duplex=False)
        self._process = FORK.Process(target=_run, args=(there, cores, job, ahead_s, port))
        self._process.start()
        there.close()
        self.address: str = here.recv()
        here.close()

    @property
    def pid(self) -> int:
        """Of the process that listens."""
        return int(self._process.pid or 0)

    @property
    def lane(self) -> str:
        """The name of its lane."""
        return f"cpu:{self.address}"

    def signal_all(self, number: int) -> None:
        """Signals every process of it."""
        own = psutil.Process(self._process.pid)
        for each in (own, *own.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    def sessions(self) -> list[psutil.Process]:
        """Its sessions, one for each loader that is connected."""
        return [each for each in psutil.Process(self._process.pid).children() if each.is_running()]

    def kill(self) -> None:
        """Ends it, as nobody would wish it."""
        self._process.kill()

    def close(self) -> None:
        """Ends it."""
        self.signal_all(signal.SIGCONT)
        self._process.kill()
        self._process.join()
        self._process.close()


@contextmanager
def agents(count: int = 1, cores: int = 2, **more: Any) -> Iterator[list[AgentProcess]]:
    """So many agents, which are ended in the end."""
    found = [AgentProcess(cores, **more) for _ in range(count)]
    try:
        yield found
    finally:
        for each in found:
            each.close()
