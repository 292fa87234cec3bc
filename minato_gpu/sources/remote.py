"""Reads of URLs, through fsspec: asynchronous where its file system is, by threads where not; tried again, and asked
for a second time.

One asynchronous file system lives as long as the reader process for each protocol and what fsspec takes from a URL for
its options (host, user, port). The others are not safe between threads: fsspec keeps one for each thread. Credentials
and the like are fsspec's to find, in its configuration or the environment.
"""

from __future__ import annotations

import asyncio
import io
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from minato_gpu.sources.source import Source

_RECENT = 512
_LEAST = 32  # latencies known before anything is called slow
_QUANTILE = 0.97
_OVER_MEDIAN = 1.5  # where all take much the same, the slowest are not slow
_SHARE = 0.05
_BURST, _FIRST = 16.0, 4.0  # saved up at most, and allowed before anything is known of them
ATTEMPTS = 5
_FIRST_PAUSE_S = 0.1
_TIME_OUT_S = 60.0  # an attempt that is not answered by then has failed
_SLACK_S = 1e-3  # the event loop's clock is no finer
_SENDS_ALL = "{source}: the server does not send parts, but all of it; declare a source without offset and length"


class RemoteReads:
    """Reads URLs: by an asynchronous file system for each protocol and options; in threads where fsspec has none."""

    def __init__(self) -> None:
        self._systems: dict[tuple[Any, ...], Any] = {}

    async def read(self, source: Source) -> bytes:
        """Returns the source's bytes.

        Raises what the file system raises, and as ``check_length``.

        For zero bytes no storage is asked: they are no range that every one knows.
        """
        if source.length == 0:
            return b""
        import fsspec

        kind = fsspec.get_filesystem_class(_protocol(source))
        if kind.async_impl:
            system = self._system(kind, source)
            data = await system._cat_file(system._strip_protocol(source.path), **asked_of(source))
        else:
            data = await asyncio.to_thread(read_here, source)
        found = bytes(data) if not isinstance(data, bytes) else data
        check_length(source, len(found))
        return found

    def _system(self, kind: Any, source: Source) -> Any:
        options = kind._get_kwargs_from_urls(source.path)
        name = _protocol(source), *sorted(options.items())
        if name not in self._systems:
            more = {"get_client": _client} if name[0] in ("http", "https") else {}
            loop = asyncio.get_running_loop()
            self._systems[name] = kind(**options, **more, asynchronous=True, loop=loop, skip_instance_cache=True)
        return self._systems[name]

    async def close(self) -> None:
        """Closes all sessions."""
        for system in self._systems.values():
            session = getattr(system, "_session", None)
            if session is not None and hasattr(session, "close"):
                closing = session.close()
                if asyncio.iscoroutine(closing):
                    await closing
        self._systems.clear()


def read_here(source: Source) -> Any:
    """Returns the source's bytes, in any kind of buffer, read by this thread; their number is not checked."""
    import fsspec

    system, path = fsspec.core.url_to_fs(source.path)
    return system.cat_file(path, **asked_of(source))


def asked_of(source: Source) -> dict[str, Any]:
    """Returns the keyword arguments for fsspec's ``cat_file``: the range, and for HTTP that it must be kept to."""
    end = None if source.length is None else source.offset + source.length
    asked: dict[str, Any] = {"start": (source.offset or None) if end is None else source.offset, "end": end}
    if source.offset and _protocol(source) in ("http", "https"):
        asked["raise_for_status"] = partial(_refuse_all, source)
    return asked


def check_length(source: Source, nbytes: int) -> None:
    """Raises EOFError if fewer bytes have come than are declared, io.UnsupportedOperation (an OSError) if more."""
    if source.length is None or nbytes == source.length:
        return
    if nbytes < source.length:
        raise EOFError(f"{source} ends {source.length - nbytes} bytes too early")
    raise io.UnsupportedOperation(_SENDS_ALL.format(source=source))


async def _refuse_all(source: Source, response: Any) -> None:
    """Refuses the answer of a server that knows no ranges and sends all that there is.

    The number of bytes need not show it. aiohttp calls this before the answer is read; other errors are fsspec's to
    raise.
    """
    if response.status == 200:
        response.close()
        raise io.UnsupportedOperation(_SENDS_ALL.format(source=source))


def _protocol(source: Source) -> str:
    return source.path.split("://", 1)[0]


async def _client(**more: Any) -> Any:
    """Returns a session of HTTP without limits of connections or time, which are the pool's to choose."""
    import aiohttp

    more.pop("loop", None)
    more.setdefault("timeout", aiohttp.ClientTimeout(total=None, sock_connect=30.0))
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300), **more)


# --- attempts --------------------------------------------------------------------------------------------------------


Answer = bytes | BaseException
Answered = Callable[[int, Answer, float], None]
"""Number, the bytes or why there are none, and the seconds of the attempt that was answered."""


@dataclass(slots=True, eq=False)
class _UrlRead:
    """One source: the attempt that runs, and what came of those before it."""

    number: int
    source: Source
    begin: float = 0.0  # beginning of the attempt
    asked: float = 0.0  # when its last request was sent
    failures: int = 0  # failed attempts
    # requests that are not answered; whether each was the second one
    requests: dict[asyncio.Task[None], bool] = field(default_factory=dict)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)  # of the attempt, or until the next one


class UrlReads:
    """Reads URLs: as many attempts as it takes, and in each one request, or a second if the first takes long.

    ``ended`` is called for every read. ``counts``: see ``ReaderPool.stats``. Each request is one task, which handles
    its answer as it ends. A read that takes long while no second request may be sent is asked for again as soon as one
    may be, the one that is needed first before others; the second request may take long as well, and then there is a
    third.
    """

    def __init__(self, remote: RemoteReads, ended: Answered) -> None:
        self._remote, self._ended = remote, ended
        self._loop = asyncio.get_running_loop()
        self._hedging = Hedging()
        self._reads: dict[int, _UrlRead] = {}
        self._late: dict[int, _UrlRead] = {}  # those that take long, and have not been asked for again
        self.counts = dict.fromkeys(("hedges", "hedges_won", "retries"), 0)

    def submit(self, number: int, source: Source) -> None:
        """Begins to read this source at once, and returns."""
        read = self._reads[number] = _UrlRead(number, source)
        self._begin(read)

    def _begin(self, read: _UrlRead) -> None:
        """Begins the next attempt."""
        read.begin = self._loop.time()
        read.timers = [self._loop.call_later(_TIME_OUT_S, self._time_out, read)]
        self._request(read, is_second=False)

    def _request(self, read: _UrlRead, *, is_second: bool) -> None:
        read.asked = self._loop.time()
        read.requests[self._loop.create_task(self._run(read))] = is_second
        self._watch(read)

    def _watch(self, read: _UrlRead) -> None:
        """Calls ``_takes_long`` once the read's last request takes long, where it is known how long that is."""
        if (patience_s := self._hedging.patience_s) is not None:
            read.timers.append(self._loop.call_at(read.asked + patience_s, self._takes_long, read))

    async def _run(self, read: _UrlRead) -> None:
        answer: Answer
        try:
            answer = await self._remote.read(read.source)
        except (Exception, asyncio.CancelledError) as error:
            answer = error
        is_second = read.requests.pop(cast("asyncio.Task[None]", asyncio.current_task()), None)
        if is_second is None:  # the other one was answered first, or it took too long
            return
        if isinstance(answer, bytes):
            self.counts["hedges_won"] += is_second
            self._answered(read, answer)
        elif not read.requests:
            self._answered(read, answer)

    def _answered(self, read: _UrlRead, answer: Answer) -> None:
        """Handles the end of an attempt."""
        self._end(read)
        seconds, was_known = self._loop.time() - read.begin, self._hedging.patience_s is not None
        self._hedging.finished(seconds)
        if not was_known:
            for each in self._reads.values():
                if each.requests:
                    self._watch(each)
        self._ask_again()
        if isinstance(answer, BaseException):
            read.failures += 1
            if read.failures < ATTEMPTS and not is_final(answer):
                self.counts["retries"] += 1
                read.timers = [self._loop.call_later(pause_s(read.failures), self._begin, read)]
                return
        del self._reads[read.number]
        self._ended(read.number, answer, seconds)

    def _end(self, read: _UrlRead) -> list[asyncio.Task[None]]:
        """Cancels what runs of an attempt; returns the requests."""
        for timer in read.timers:
            timer.cancel()
        for request in read.requests:
            request.cancel()
        requests, read.requests, read.timers = [*read.requests], {}, []
        self._late.pop(read.number, None)
        return requests

    def _takes_long(self, read: _UrlRead) -> None:
        self._late[read.number] = read
        self._ask_again()

    def _ask_again(self) -> None:
        """Sends requests for late reads once more, as far as that is allowed now. What others take may have grown since
        a read was called late."""
        sent_before = self._loop.time() - (self._hedging.patience_s or 0.0) + _SLACK_S
        due = sorted(number for number, read in self._late.items() if read.asked <= sent_before)
        for number in due:
            if not self._hedging.take():
                break
            self.counts["hedges"] += 1
            self._request(self._late.pop(number), is_second=True)

    def _time_out(self, read: _UrlRead) -> None:
        self._answered(read, TimeoutError(f"{read.source} has not been answered in {_TIME_OUT_S:g} seconds"))

    async def close(self) -> None:
        """Ends what is under way, and reports nothing."""
        requests = [request for read in self._reads.values() for request in self._end(read)]
        await asyncio.gather(*requests, return_exceptions=True)
        await self._remote.close()


# --- when to ask again, and what would fail again ---------------------------------------------------------------------


class Hedging:
    """Follows the latencies of requests of one kind, and decides when to send a slow one a second time.

    A request to remote storage takes ten times as long as usual once in a hundred, and an equal one that is sent then
    is mostly sooner there (Dean and Barroso, "The tail at scale", 2013). Such *hedges* are one for twenty requests.

    ``patience_s``: how long to wait before asking again; None: not known yet.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._since_sorted = _RECENT
        self.patience_s: float | None = None
        self._allowed = _FIRST

    def finished(self, latency_s: float) -> None:
        """Notes that an attempt has ended, answered or not, so many seconds after its first request was sent."""
        self._recent.append(latency_s)
        self._allowed = min(_BURST, self._allowed + _SHARE)
        self._since_sorted += 1
        if self._since_sorted >= _LEAST and len(self._recent) >= _LEAST:
            self._since_sorted = 0
            known = sorted(self._recent)
            self.patience_s = max(known[int(_QUANTILE * len(known))], _OVER_MEDIAN * known[len(known) // 2])

    def take(self) -> bool:
        """Counts a slow request that is sent once more. Returns False if none may be."""
        if self._allowed < 1.0:
            return False
        self._allowed -= 1.0
        return True


def pause_s(failures: int) -> float:
    """Returns the seconds to wait after so many failures of a read, with a random spread so that not all retry at
    once."""
    return float(_FIRST_PAUSE_S * 2 ** (failures - 1)) * random.uniform(0.5, 1.5)


def is_final(error: BaseException) -> bool:
    """Returns whether the same request would fail again."""
    final = (
        PermissionError,
        FileNotFoundError,
        IsADirectoryError,
        NotADirectoryError,
        EOFError,
        ValueError,
        TypeError,
        ImportError,
    )
    status = _status(error)
    return isinstance(error, final) or (status is not None and 400 <= status < 500 and status not in (408, 429))


def _status(error: BaseException) -> int | None:
    """Returns HTTP's status of an error (or of its cause), where aiohttp, gcsfs, adlfs, requests and botocore put
    it."""
    for each in (error, error.__cause__):
        response = getattr(each, "response", None)
        more = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        for place, name in ((each, "status"), (each, "status_code"), (each, "code"), (response, "status_code")):
            if isinstance(found := getattr(place, name, None), int):
                return found
        if isinstance(found := more.get("HTTPStatusCode"), int):
            return found
    return None
