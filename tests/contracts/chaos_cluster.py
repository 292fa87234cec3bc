"""Kills, stops and cuts off agents of loaders by seed: ``make chaos CLUSTER=1 SECONDS=600 SEED=...``.

Each run is a loader with one worker here and two agents, each behind a proxy, to which things happen between batches.
What comes must be, bit for bit, what comes without agents, in the same order (or, out of order, the same samples); no
sample may be blamed. Prints the seed of each run; where something is wrong, the exit status is 1.
"""

from __future__ import annotations

import gc
import logging
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cache
from typing import Any

import click
import psutil
import torch

from benchmarks import report
from benchmarks.proxy import Proxy
from minato_gpu.util.messages import LOGGER
from tests.lanes.test_far import MODES, bits, made, there
from tests.support.agents import AgentProcess, agents

_HARM = 0.3  # of the batches at which something happens
_EPOCHS = 2
_WORKERS = 1  # that is killed: the second at one sample would end the run, as it should
_MODES = {**MODES, "out of order": {"in_order": False, "max_lateness": 4}}


def _samples_of(batches: list[Any]) -> list[Any]:
    """The samples of batches of rows, sorted."""
    return sorted(
        (int(key), values.numpy().tobytes(), name)
        for batch in batches
        for key, values, name in zip(batch["key"], batch["values"], batch["name"], strict=True)
    )


class Site:
    """Two agents, and what happens to them."""

    def __init__(self, rng: random.Random, undo: ExitStack) -> None:
        self._rng = rng
        self.counts: Counter[str] = Counter()
        self._agents = undo.enter_context(agents(2, rng.randint(1, 3)))
        self.proxies = [Proxy(each.address) for each in self._agents]
        for proxy in self.proxies:
            undo.callback(proxy.cut)
        undo.callback(self.end)
        self._later: list[Any] = []  # what ends what has happened

    def happen(self) -> None:
        """Something happens to an agent; what has happened before may end."""
        if self._later and self._rng.random() < 0.5:
            self._later.pop(0)()
            return
        at = self._rng.randrange(2)
        what = self._rng.choice(("session", "worker", "stop", "cut", "pause"))
        if what == "worker" and self.counts[what] == _WORKERS:
            return
        self.counts[what] += 1
        agent, proxy = self._agents[at], self.proxies[at]
        if what == "session":
            with suppress(psutil.NoSuchProcess):  # another has ended meanwhile
                for session in agent.sessions():
                    session.kill()
        elif what == "worker":
            self._kill_one(agent)
        elif what in ("stop", "pause"):
            agent.signal_all(signal.SIGSTOP)
            self._later.append(lambda: agent.signal_all(signal.SIGCONT))
            if what == "pause":
                time.sleep(self._rng.uniform(0.0, 1.5))
                self._later.pop()()
        elif proxy.start not in self._later:
            proxy.cut()
            self._later.append(proxy.start)

    def _kill_one(self, agent: AgentProcess) -> None:
        """Ends one of an agent's workers."""
        with suppress(psutil.NoSuchProcess, IndexError):
            found = [each for session in agent.sessions() for each in session.children(recursive=True)]
            self._rng.choice([each for each in found if each.name().startswith("minato-work")]).kill()

    def end(self) -> None:
        """All that has happened ends."""
        while self._later:
            self._later.pop()()


@cache
def _expected(mode: str) -> list[Any]:
    loader = made(**_MODES[mode], persistent_workers=True)
    return [list(loader) for _ in range(_EPOCHS)]


def run(seed: int) -> Counter[str]:
    """Runs one loader. Raises AssertionError where something is lost, doubled, wrong or blamed."""
    rng = random.Random(seed)
    mode = rng.choice(list(_MODES))
    with ExitStack() as undo:
        site = Site(rng, undo)
        more = {**_MODES[mode], "persistent_workers": True, "on_worker_death": "replace"}
        loader: Any = made(agents=site.proxies, awaits=False, slow_here=True, **more)
        for number, expected in enumerate(_expected(mode)):
            got = list(_taken(loader, rng, site))
            same = _samples_of(got) == _samples_of(expected) if mode == "out of order" else bits(got) == bits(expected)
            assert same, f"seed {seed}: epoch {number} of {mode!r} differs: {len(got)} of {len(expected)} batches"
            site.counts["far samples"] += there(loader)
            assert loader.stats()["failures"] == [], loader.stats()["failures"]
        del loader
        gc.collect()
    return site.counts


def _taken(loader: Any, rng: random.Random, site: Site) -> Iterator[Any]:
    for batch in loader:
        yield batch
        if rng.random() < _HARM:
            site.happen()


@click.command(help=__doc__)
@click.option("--seconds", type=click.FloatRange(min=0), default=60, show_default=True)
@click.option("--seed", "first", type=click.IntRange(min=0), help="A random one if not given.")
def main(seconds: float, first: int | None) -> None:
    torch.set_num_threads(1)
    LOGGER.setLevel(logging.CRITICAL + 1)
    first = random.SystemRandom().randrange(1 << 32) if first is None else first
    end, seed, counts = time.monotonic() + seconds, first, Counter[str]()
    while seed == first or time.monotonic() < end:
        report.progress(f"seed {seed}")
        counts += run(seed)
        seed += 1
    report.print_table(
        f"{seed - first} seeds from {first}",
        [{"what": what, "count": count} for what, count in sorted(counts.items())],
        ("what", "count"),
    )


if __name__ == "__main__":
    main()
