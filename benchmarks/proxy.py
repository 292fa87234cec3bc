"""A connection that is far away, or is cut: a process between a loader and an agent."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.isolate import FORK

_CHUNK = 1 << 18


class Proxy:
    """Passes on what comes to ``address`` to the agent at ``behind``, and its answers, each ``delay_s`` later."""

    def __init__(self, behind: str, delay_s: float = 0.0) -> None:
        self._behind, self._delay_s = behind, delay_s
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        """Listens, at the same address as before."""
        here, there = FORK.Pipe(duplex=False)
        port = int(self.address.rpartition(":")[2])
        arguments = there, port, self._behind, self._delay_s
        self._process = FORK.Process(target=lambda: asyncio.run(_serve(*arguments)), daemon=True)
        self._process.start()
        there.close()
        self.address = here.recv()
        here.close()

    def cut(self) -> None:
        """Cuts all connections, and makes no others until it is started again."""
        self._process.kill()
        self._process.join()
        self._process.close()


async def _serve(told: Any, port: int, behind: str, delay_s: float) -> None:
    host, _, number = behind.rpartition(":")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other, to_other = await asyncio.open_connection(host, int(number))
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pass_on(reader, to_other, delay_s), _pass_on(other, writer, delay_s))

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    told.send("{}:{}".format(*server.sockets[0].getsockname()))
    await server.serve_forever()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    try:
        while data := await reader.read(_CHUNK):
            if delay_s:
                loop.call_later(delay_s, writer.write, data)
            else:
                writer.write(data)
                await writer.drain()
    except OSError:
        pass
    loop.call_later(delay_s, writer.close)
