"""Storage that is as slow as one says: a server of byte ranges over HTTP, a process of its own, for all loaders alike.

Each request waits a latency, drawn anew: the median times what a log-normal of sigma 0.1 gives, and ten times as long
for a share ``tail`` of them; then its bytes wait for their turn at ``rate`` bytes a second (a token bucket; None: at
once). ``GET /set?latency_ms=...`` changes the latency while it runs. The object ``/N.bin`` is ``nbytes`` bytes that
depend on N alone (``content``), so that whoever reads can check them; ``/served`` tells the bytes of all answers. It
listens on the loopback interface only.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import random
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from aiohttp import web

_SPREAD, _TAIL_TIMES = 0.1, 10.0


@dataclass
class Throttle:
    """What a request waits for. ``latency_ms`` is the median; ``rate`` in bytes a second."""

    latency_ms: float
    tail: float = 0.0
    rate: float | None = None

    def latency_s(self, rng: random.Random) -> float:
        """Drawn for one request."""
        slow = _TAIL_TIMES if rng.random() < self.tail else 1.0
        return self.latency_ms / 1e3 * math.exp(rng.gauss(0.0, _SPREAD)) * slow


def content(number: int, nbytes: int) -> NDArray[np.uint8]:
    """The bytes of object ``number``: uint8 (nbytes,)."""
    data = np.full(nbytes, number % 251, np.uint8)
    data[: min(8, nbytes)] = np.frombuffer(np.int64(number).tobytes(), np.uint8)[:nbytes]
    return data


@contextmanager
def server(throttle: Throttle, nbytes: int) -> Iterator[str]:
    """The address of a server that runs in here, such as ``"http://127.0.0.1:4711"``."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, throttle, nbytes), daemon=True)
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


def served(address: str) -> int:
    """The bytes of all answers of the server there."""
    with urllib.request.urlopen(f"{address}/served") as answer:
        return int(answer.read())


def _serve(pipe: Connection, throttle: Throttle, nbytes: int) -> None:
    asyncio.run(_main(pipe, throttle, nbytes))
    os._exit(0)


async def _main(pipe: Connection, throttle: Throttle, nbytes: int) -> None:
    from aiohttp import web

    loop, rng, ended = asyncio.get_running_loop(), random.Random(0), asyncio.Event()
    sent, free_at = 0, 0.0  # bytes; when transfers have ended, which follow each other

    async def get(request: web.Request) -> web.Response:
        nonlocal sent, free_at
        begin, end, _ = request.http_range.indices(nbytes)
        sent += end - begin
        await asyncio.sleep(throttle.latency_s(rng))
        if throttle.rate is not None:
            now = loop.time()
            free_at = max(free_at, now) + (end - begin) / throttle.rate
            await asyncio.sleep(free_at - now)
        data = content(int(request.match_info["number"]), nbytes)[begin:end].tobytes()
        if len(data) == nbytes:
            return web.Response(body=data)
        return web.Response(body=data, status=206, headers={"Content-Range": f"bytes {begin}-{end - 1}/{nbytes}"})

    async def change(request: web.Request) -> web.Response:
        throttle.latency_ms = float(request.query["latency_ms"])
        return web.Response(text="")

    async def count(_: web.Request) -> web.Response:
        return web.Response(text=f"{sent}")

    application = web.Application()
    application.add_routes([web.get("/set", change), web.get("/served", count), web.get("/{number}.bin", get)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    pipe.send(runner.addresses[0][1])
    loop.add_reader(pipe.fileno(), ended.set)  # closed by who has started this
    await ended.wait()
