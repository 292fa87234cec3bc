"""What a hit in another host's memory costs (``cache_peers``): the host that has it in one process, the one that asks
in another, over loopback.

``cpu_us`` is the CPU of both processes for each source, ``reads_per_s`` how many come in a second with 64 asked for at
a time. A bare exchange beside it: as many bytes through one connection of asyncio's streams, without requests and
checksums.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from time import perf_counter, process_time
from typing import Any

from benchmarks import report
from benchmarks.isolate import FORK
from minato_gpu.memory.arena import Arena
from minato_gpu.sources.cluster_token import TOKEN
from minato_gpu.sources.memory_tier import Copy
from minato_gpu.sources.peers import PeerPool, PeerServer
from minato_gpu.sources.pool import ReaderPool
from minato_gpu.sources.shared_reads import SharedReads, SharedTier
from minato_gpu.sources.source import Source

_AT_ONCE = 64
_HERE = "here"  # the address of the host that asks, which keeps nothing

Row = dict[str, Any]


async def _serve(pipe: Connection, nbytes: int, sources: int) -> None:
    """The host that has all sources in memory."""
    loop, arena = asyncio.get_running_loop(), Arena("peers", 2 * sources * (nbytes + 8192) + (1 << 26))
    reads, tier = SharedReads(arena, loop.call_soon), SharedTier(2 * sources * (nbytes + 8192))
    storage = ReaderPool(reads.blocks, reads.done)
    reads.pool = PeerPool(storage, reads.blocks, reads.done)
    for source in _candidates(nbytes, sources):
        block, view = reads.blocks.allocate(nbytes)
        view[:] = os.urandom(nbytes)
        tier.offer(0, Copy(source.key, block, nbytes, reads.blocks.publish(block)), 0)
    listening = socket.create_server(("127.0.0.1", 0))
    server = PeerServer(listening, reads.blocks, tier.part(), lambda service: reads.client(service, storage))
    bare = await asyncio.start_server(lambda _, writer: _stream(writer, nbytes), "127.0.0.1", 0)
    pipe.send((listening.getsockname()[1], bare.sockets[0].getsockname()[1]))
    while not await asyncio.to_thread(pipe.poll, None) or pipe.recv() != "end":
        pipe.send(process_time())
    server.close()
    await storage.close()


def _candidates(nbytes: int, sources: int) -> list[Source]:
    return [Source(f"/{number}", 0, nbytes) for number in range(sources)]


async def _stream(writer: asyncio.StreamWriter, nbytes: int) -> None:
    data = bytes(nbytes)
    with suppress(ConnectionError):  # the other end has had enough
        while True:
            writer.write(data)
            await writer.drain()


async def _measure(pipe: Connection, nbytes: int, sources: int, repetitions: int) -> Row:
    """The host that asks."""
    port, bare_port = pipe.recv()
    arena = Arena("peers", 1 << 28)
    told: asyncio.Queue[tuple[int, int, BaseException | None]] = asyncio.Queue()
    reads = SharedReads(arena, asyncio.get_running_loop().call_soon)

    def done(number: int, block: int, nbytes: int, error: BaseException | None, **_: Any) -> None:
        told.put_nowait((block, nbytes, error))

    storage = ReaderPool(reads.blocks, done)
    pool = PeerPool(storage, reads.blocks, done)
    pool.join(_HERE, (_HERE, f"127.0.0.1:{port}"))
    wanted = [source for source in _candidates(nbytes, sources) if not pool.owns(source.key)]
    sources = len(wanted)
    cpu, rates, bare, bare_rates = list[float](), list[float](), list[float](), list[float]()
    for _ in range(repetitions + 1):
        before, begin = _cpu(pipe), perf_counter()
        for number in range(sources + _AT_ONCE):
            if number >= _AT_ONCE:
                block, size, error = await told.get()
                if error is not None or size != nbytes:
                    raise AssertionError(f"no hit: {error!r}, {size} bytes")
                reads.blocks.free(block)
            if number < sources:
                pool.submit(number, wanted[number])
        rates.append(sources / (perf_counter() - begin))
        cpu.append((_cpu(pipe) - before) / sources)
        before, begin = _cpu(pipe), perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", bare_port)
        for _ in range(sources):
            await reader.readexactly(nbytes)
        writer.close()
        bare_rates.append(sources / (perf_counter() - begin))
        bare.append((_cpu(pipe) - before) / sources)
    if pool.counts()["failed"]:
        raise AssertionError(pool.why)
    await storage.close()
    row: Row = {"bytes": nbytes}  # the first turn connects
    row |= report.summarise("cpu", [1e6 * each for each in cpu[1:]], "_us")
    row |= report.summarise("bare_cpu", [1e6 * each for each in bare[1:]], "_us")
    return row | {"reads_per_s": report.median(rates[1:]), "bare_per_s": report.median(bare_rates[1:])}


def _cpu(pipe: Connection) -> float:
    """CPU seconds of both processes."""
    pipe.send("cpu")
    return process_time() + float(pipe.recv())


@report.benchmark("peer_hits", 5)
def main(quick: bool, repetitions: int) -> Iterator[Row]:
    os.environ.setdefault(TOKEN, os.urandom(8).hex())
    for nbytes in (100_000,) if quick else (10_000, 100_000, 1_000_000):
        sources = 200 if quick else 2_000 if nbytes < 1_000_000 else 400
        ours, theirs = FORK.Pipe()
        serves = theirs, nbytes, sources
        server = FORK.Process(target=lambda *arguments: asyncio.run(_serve(*arguments)), args=serves, daemon=True)
        server.start()
        yield asyncio.run(_measure(ours, nbytes, sources, repetitions))
        ours.send("end")
        server.join()


if __name__ == "__main__":
    main()
