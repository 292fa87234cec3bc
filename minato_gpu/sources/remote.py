"""Reads of URLs, through fsspec: asynchronous where its file system is, by threads where not.

One file system for each protocol lives as long as the reader process. Credentials and the like are fsspec's to find, in
its configuration or the environment.
"""

from __future__ import annotations

import asyncio
import io
from functools import partial
from typing import Any

from minato_gpu.sources.source import Source


class RemoteReads:
    """File systems by protocol."""

    def __init__(self) -> None:
        self._systems: dict[str, Any] = {}

    async def read(self, source: Source) -> bytes:
        """The source's bytes. Raises what the file system does, and EOFError where there are fewer than declared. For
        none it is not asked: they are no range that every storage knows."""
        if source.length == 0:
            return b""
        system = self._system(source)
        path = system._strip_protocol(source.path)
        asked = asked_of(source)
        if system.async_impl:
            data = await system._cat_file(path, **asked)
        else:
            data = await asyncio.to_thread(system.cat_file, path, **asked)
        found = bytes(data) if not isinstance(data, bytes) else data
        if source.length is not None and len(found) != source.length:
            which = "fewer" if len(found) < source.length else "more"
            raise EOFError(f"{source} was to have {source.length} bytes and has {which}: {len(found)} came")
        return found

    def renew(self, source: Source) -> None:
        """Begin with a new session: a token has expired."""
        protocol = _protocol(source)
        system = self._systems.pop(protocol, None)
        if system is not None:
            self._systems[f"{protocol}, before {len(self._systems)}"] = system  # to be closed at the end
            type(system).clear_instance_cache()

    def _system(self, source: Source) -> Any:
        protocol = _protocol(source)
        if protocol not in self._systems:
            import fsspec

            kind = fsspec.get_filesystem_class(protocol)
            more = {"asynchronous": True, "loop": asyncio.get_running_loop()} if kind.async_impl else {}
            if protocol in ("http", "https"):
                more["get_client"] = _client
            options = kind._get_kwargs_from_urls(source.path)
            self._systems[protocol] = kind(**options, **more, skip_instance_cache=True)
        return self._systems[protocol]

    async def close(self) -> None:
        """Close all sessions."""
        for system in self._systems.values():
            session = getattr(system, "_session", None)
            if session is not None and hasattr(session, "close"):
                closing = session.close()
                if asyncio.iscoroutine(closing):
                    await closing
        self._systems.clear()


def asked_of(source: Source) -> dict[str, Any]:
    """What fsspec's ``cat_file`` is asked for, besides the path."""
    if source.length is not None:
        return {"start": source.offset, "end": source.offset + source.length}
    asked: dict[str, Any] = {"start": source.offset or None, "end": None}
    if source.offset and _protocol(source) in ("http", "https"):
        asked["raise_for_status"] = partial(_refuse_all, source)
    return asked


async def _refuse_all(source: Source, response: Any) -> None:
    """A server that knows no ranges answers with all that there is, of which the number of bytes does not tell where
    none is declared. It is not read; aiohttp calls this before it is. What is wrong otherwise is for fsspec to say."""
    if response.status == 200:
        response.close()
        raise io.UnsupportedOperation(
            f"{source}: the server does not send parts, but all of it; declare a source without an offset"
        )


def _protocol(source: Source) -> str:
    return source.path.split("://", 1)[0]


async def _client(**more: Any) -> Any:
    """A session of HTTP with as many connections as there are reads: their number is the pool's to choose, and so is
    when a request has taken too long."""
    import aiohttp

    more.pop("loop", None)
    more.setdefault("timeout", aiohttp.ClientTimeout(total=None, sock_connect=30.0))
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300), **more)
