"""Reads of URLs, through fsspec: asynchronous where its file system is, by threads where not.

One asynchronous file system lives as long as the reader process for each protocol and what fsspec takes from a URL for
its options (host, user, port). The others are not safe between threads: fsspec keeps one for each thread. Credentials
and the like are fsspec's to find, in its configuration or the environment.
"""

from __future__ import annotations

import asyncio
import io
from functools import cache, partial
from typing import Any

from minato_gpu.sources.source import Source

_SENDS_ALL = "{source}: the server does not send parts, but all of it; declare a source without offset and length"


class RemoteReads:
    """Asynchronous file systems, by protocol and options."""

    def __init__(self) -> None:
        self._systems: dict[str, Any] = {}
        self._former: list[Any] = []  # to be closed at the end

    async def read(self, source: Source) -> bytes:
        """The source's bytes. Raises what the file system does, and EOFError where there are fewer than declared. For
        none it is not asked: they are no range that every storage knows."""
        if source.length == 0:
            return b""
        kind = _kind(source)
        if kind.async_impl:
            system = self._system(kind, source)
            data = await system._cat_file(system._strip_protocol(source.path), **asked_of(source))
        else:
            data = await asyncio.to_thread(read_here, source)
        found = bytes(data) if not isinstance(data, bytes) else data
        check_length(source, len(found))
        return found

    def renew(self, source: Source) -> None:
        """Begin with a new session: a token has expired."""
        kind = _kind(source)
        system = self._systems.pop(_name(kind, source), None)
        if system is not None:
            self._former.append(system)
        kind.clear_instance_cache()

    def _system(self, kind: Any, source: Source) -> Any:
        name = _name(kind, source)
        if name not in self._systems:
            more = {"get_client": _client} if _protocol(source) in ("http", "https") else {}
            options = kind._get_kwargs_from_urls(source.path)
            loop = asyncio.get_running_loop()
            self._systems[name] = kind(**options, **more, asynchronous=True, loop=loop, skip_instance_cache=True)
        return self._systems[name]

    async def close(self) -> None:
        """Close all sessions."""
        for system in (*self._systems.values(), *self._former):
            session = getattr(system, "_session", None)
            if session is not None and hasattr(session, "close"):
                closing = session.close()
                if asyncio.iscoroutine(closing):
                    await closing
        self._systems.clear()
        self._former.clear()


def read_here(source: Source) -> Any:
    """The source's bytes, of any kind of buffer, read by this thread."""
    import fsspec

    system, path = fsspec.core.url_to_fs(source.path)
    return system.cat_file(path, **asked_of(source))


def asked_of(source: Source) -> dict[str, Any]:
    """What fsspec's ``cat_file`` is asked for, besides the path."""
    end = None if source.length is None else source.offset + source.length
    asked: dict[str, Any] = {"start": (source.offset or None) if end is None else source.offset, "end": end}
    if source.offset and _protocol(source) in ("http", "https"):
        asked["raise_for_status"] = partial(_refuse_all, source)
    return asked


def check_length(source: Source, nbytes: int) -> None:
    """Raise where another number of bytes has come than is declared."""
    if source.length is None or nbytes == source.length:
        return
    if nbytes < source.length:
        raise EOFError(f"{source} ends {source.length - nbytes} bytes too early")
    raise io.UnsupportedOperation(_SENDS_ALL.format(source=source))


async def _refuse_all(source: Source, response: Any) -> None:
    """A server that knows no ranges answers with all that there is, of which the number of bytes need not tell. It
    is not read; aiohttp calls this before it is. What is wrong otherwise is for fsspec to say."""
    if response.status == 200:
        response.close()
        raise io.UnsupportedOperation(_SENDS_ALL.format(source=source))


def _protocol(source: Source) -> str:
    return source.path.split("://", 1)[0]


def _kind(source: Source) -> Any:
    """The class of the file system that the source is read by."""
    return _class_of(_protocol(source))


@cache
def _class_of(protocol: str) -> Any:
    import fsspec

    return fsspec.get_filesystem_class(protocol)


def _name(kind: Any, source: Source) -> str:
    """Tells apart file systems that are not the same for two sources."""
    return f"{_protocol(source)} {sorted(kind._get_kwargs_from_urls(source.path).items())}"


async def _client(**more: Any) -> Any:
    """A session of HTTP with as many connections as there are reads: their number is the pool's to choose, and so is
    when a request has taken too long."""
    import aiohttp

    more.pop("loop", None)
    more.setdefault("timeout", aiohttp.ClientTimeout(total=None, sock_connect=30.0))
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300), **more)
