"""Errors that are kept to be raised later keep nobody's frames alive."""

from __future__ import annotations

import gc
import weakref

import pytest

from minato_gpu.faults.deferred import DeferredError


class Held:
    """What a frame holds."""


def _raised(error: Exception) -> tuple[Exception, weakref.ref[Held]]:
    """The error, raised in a frame that holds something."""
    held = Held()
    try:
        raise error
    except Exception as caught:
        return caught, weakref.ref(held)


def test_the_frames_of_an_error_and_of_all_that_it_names_are_let_go() -> None:
    """A cause, a context, members of a group and of a group in it, and what caused those; a circle does no harm."""
    cause, one = _raised(ValueError("cause"))
    deep, two = _raised(KeyError("deep"))
    deep.__cause__ = cause
    inner, three = _raised(ExceptionGroup("inner", [deep, OSError("away")]))
    outer, four = _raised(ExceptionGroup("outer", [inner]))
    cause.__context__ = outer
    later = DeferredError()
    gc.disable()
    try:
        later.keep(outer)
        assert [held() for held in (one, two, three, four)] == [None] * 4
    finally:
        gc.enable()
    assert "inner" in "".join(outer.__notes__) and "in _raised" in "".join(outer.__notes__)
    with pytest.raises(ExceptionGroup) as raised:
        later.raise_kept()
    assert raised.value is outer
    later.raise_kept()
