"""Properties that are computed when they are first read.

``functools.cached_property`` of Python 3.11 computes them under a lock, one for all objects of a class. A worker that
is forked while another thread holds it waits for ever. Here there is no lock: two threads that read a property for the
first time at once both compute it, as from Python 3.12 on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):  # named as functools names it
    """Decorates a method without arguments. Its result is stored in the object's ``__dict__`` when it is first read."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> cached_property[T] | T:
        if instance is None:
            return self
        value = self._function(instance)
        instance.__dict__[self._name] = value  # which is found there before this is asked again
        return value
