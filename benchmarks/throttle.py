"""Storage that is as slow as one says: a server of byte ranges over HTTP, a process of its own, for all loaders alike.

Each request waits a latency, drawn anew: the median times what a log-normal of sigma 0.1 gives, and ``tail_times`` as
long for a share ``tail`` of them; then its bytes wait for their turn at ``rate`` bytes a second (a token bucket; None:
at once). ``GET /set?latency_ms=...`` changes that while it runs. The object ``/N.bin`` is ``nbytes`` bytes that depend
on N alone (``content``), so that whoever reads can check them; ``/served`` tells the bytes of all answers. It
listens on the loopback interface only.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from aiohttp import web

SPREAD = 0.1


@dataclass
class Throttle:
    """What a request waits for. ``latency_ms`` is the median; ``rate`` in bytes a second."""

    latency_ms: float = 0.0
    tail: float = 0.0
    tail_times: float = 10.0
    rate: float | None = None

    def latency_s(self, rng: random.Random) -> float:
        """Drawn for one request."""
        slow = self.tail_times if rng.random() < self.tail else 1.0
        return self.latency_ms / 1e3 * math.exp(rng.gauss(0.0, SPREAD)) * slow

    def mean_s(self) -> float:
        """The mean of that."""
        return self.latency_ms / 1e3 * math.exp(SPREAD**2 / 2) * (1 + self.tail * (self.tail_times - 1))


def content(number: int, nbytes: int) -> NDArray[np.uint8]:
    """The bytes of object ``number``: uint8 (nbytes,)."""
    data = np.full(nbytes, number % 251, np.uint8)
    data[: min(8, nbytes)] = np.frombuffer(np.int64(number).tobytes(), np.uint8)[:nbytes]
    return data


@contextmanager
def server(throttle: Throttle, nbytes: int, seed: int = 0) -> Iterator[str]:
    """The address of a server that runs in here, such as ``"http://127.0.0.1:4711"``."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, throttle, nbytes, seed), daemon=True)
    process.start()
    theirs.close()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        ours.close()
        process.join(5.0)
        if process.exitcode is None:
            process.kill()
            process.join()


def _serve(end: Connection, throttle: Throttle, nbytes: int, seed: int) -> None:
    asyncio.run(_main(end, throttle, nbytes, seed))
    os._exit(0)


async def _main(end: Connection, throttle: Throttle, nbytes: int, seed: int) -> None:
    from aiohttp import web

    rng, turn, served = random.Random(seed), _Turn(), 0
    ended = asyncio.Event()

    async def answer(request: web.Request, whole: bytes) -> web.Response:
        nonlocal served
        begin, size = _range(request, len(whole))
        served += size
        await asyncio.sleep(throttle.latency_s(rng))
        if throttle.rate is not None:
            await asyncio.sleep(turn.wait_s(size / throttle.rate))
        partial = size < len(whole)
        headers = {"Content-Range": f"bytes {begin}-{begin + size - 1}/{len(whole)}"} if partial else {}
        data = whole[begin : begin + size] if partial else whole
        return web.Response(body=data, status=206 if partial else 200, headers=headers)

    async def get(request: web.Request) -> web.Response:
        return await answer(request, content(int(request.match_info["number"]), nbytes).tobytes())

    async def change(request: web.Request) -> web.Response:
        for name, value in request.query.items():
            setattr(throttle, name, None if value == "None" else float(value))
        return web.Response(text="")

    async def count(_: web.Request) -> web.Response:
        return web.Response(text=f"{served}")

    application = web.Application()
    application.add_routes(
        [
            web.get("/set", change),
            web.get("/served", count),
            web.get("/{number}.bin", get),
        ]
    )
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    end.send(runner.addresses[0][1])
    asyncio.get_running_loop().add_reader(end.fileno(), ended.set)  # closed by who has started this
    await ended.wait()


class _Turn:
    """A token bucket without a reserve: transfers follow each other."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def wait_s(self, seconds: float) -> float:
        """Until a transfer that takes so long has ended, if it may begin now or after those before."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + seconds
        return self._free_at - now


def _range(request: Any, nbytes: int) -> tuple[int, int]:
    """First byte and number of bytes that are asked for."""
    asked = request.headers.get("Range")
    if asked is None:
        return 0, nbytes
    first, _, last = asked.removeprefix("bytes=").partition("-")
    begin = int(first or 0)
    return begin, min(int(last) + 1 if last else nbytes, nbytes) - begin
