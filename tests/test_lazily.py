"""Properties that are computed once, without a lock that a fork could leave behind."""

from __future__ import annotations

import multiprocessing
import re
import threading
from pathlib import Path

import pytest

import minato_gpu
from minato_gpu.lazily import cached_property

PACKAGE = Path(minato_gpu.__file__).parent


class Asked:
    """Counts how often its property is computed."""

    def __init__(self) -> None:
        self.times = 0
        self.begun, self.goes_on = threading.Event(), threading.Event()

    @cached_property
    def plain(self) -> int:
        """How often."""
        self.times += 1
        return self.times

    @cached_property
    def slow(self) -> int:
        """Waits."""
        self.begun.set()
        self.goes_on.wait()
        return 1


def test_it_is_computed_once_for_each_object() -> None:
    one, other = Asked(), Asked()
    assert [one.plain, one.plain, other.plain] == [1, 1, 1]
    assert Asked.plain.__doc__ == "How often."


def _asks() -> None:
    asked = Asked()
    asked.goes_on.set()
    raise SystemExit(asked.slow + 4)


@pytest.mark.usefixtures("no_leaks")
def test_a_fork_in_the_middle_of_it_is_not_held_up() -> None:
    """As ``functools.cached_property`` of Python 3.11 does."""
    asked = Asked()
    thread = threading.Thread(target=lambda: asked.slow)
    thread.start()
    asked.begun.wait()
    child = multiprocessing.get_context("fork").Process(target=_asks)
    child.start()
    child.join()
    asked.goes_on.set()
    thread.join()
    assert child.exitcode == 5


def test_what_workers_may_use_has_no_other() -> None:
    rooms = PACKAGE.rglob("*.py")
    found = {
        file for file in rooms if re.search(r"^from functools import .*cached_property", file.read_text(), re.MULTILINE)
    }
    assert found == {PACKAGE / "simulation" / "work.py"}, "no loader imports it, and it imports nothing but decisions"
