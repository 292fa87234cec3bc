"""One timer for many who wait, on a virtual clock."""

from __future__ import annotations

import asyncio

from minato_gpu.sources.overdue import Overdue
from tests.sources.virtual import run


def test_each_is_due_at_its_time_and_only_those_that_still_wait() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, acted = asyncio.get_running_loop(), list[tuple[str, float]]()
        begin = loop.time()
        overdue = Overdue[str](lambda: 10.0, lambda each: acted.append((each, round(loop.time() - begin, 2))))
        for at, each in enumerate("abcd"):
            overdue.add(each, loop.time())
            if at == 2:
                overdue.remove("a")
            await asyncio.sleep(1.0)
        overdue.remove("c")
        await asyncio.sleep(20.0)
        overdue.add("e", loop.time())
        await asyncio.sleep(20.0)
        return acted

    assert run(main()) == [("b", 11.0), ("d", 13.0), ("e", 34.0)]


def test_nobody_is_due_before_it_is_known_when() -> None:
    async def main() -> list[str]:
        loop, acted = asyncio.get_running_loop(), list[str]()
        after: list[float | None] = [None]
        overdue = Overdue[str](lambda: after[0], acted.append)
        overdue.add("a", loop.time())
        await asyncio.sleep(5.0)
        overdue.add("b", loop.time())
        assert acted == []
        after[0] = 3.0
        overdue.look()
        assert acted == ["a"]
        await asyncio.sleep(4.0)
        overdue.add("c", loop.time())
        overdue.close()
        await asyncio.sleep(4.0)
        return acted

    assert run(main()) == ["a", "b"]


def test_who_is_ended_by_another_is_not_acted_on() -> None:
    async def main() -> list[str]:
        loop, acted = asyncio.get_running_loop(), list[str]()

        def act(each: str) -> None:
            acted.append(each)
            overdue.remove("b")

        overdue = Overdue[str](lambda: 1.0, act)
        for each in "abc":
            overdue.add(each, loop.time())
        await asyncio.sleep(2.0)
        return acted

    assert run(main()) == ["a", "c"]
