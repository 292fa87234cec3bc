"""Tells whether an argument is a number: Python's or NumPy's, and no bool."""

from __future__ import annotations

from numbers import Integral, Real
from typing import TypeGuard


def is_whole(given: object) -> TypeGuard[int]:
    """Returns whether an argument is a whole number, which ``int`` makes Python's."""
    return isinstance(given, Integral) and not isinstance(given, bool)


def is_real(given: object) -> TypeGuard[float]:
    """Returns whether an argument is a real number, which ``float`` makes Python's."""
    return isinstance(given, Real) and not isinstance(given, bool)
