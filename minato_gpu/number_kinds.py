"""Which arguments are numbers: Python's own and NumPy's, and no bool."""

from __future__ import annotations

from numbers import Integral, Real
from typing import TypeGuard


def is_whole(given: object) -> TypeGuard[int]:
    """Whether it is a whole number; ``int`` makes it Python's."""
    return isinstance(given, Integral) and not isinstance(given, bool)


def is_real(given: object) -> TypeGuard[float]:
    """Whether it is a number, whole or not; ``float`` makes it Python's."""
    return isinstance(given, Real) and not isinstance(given, bool)
