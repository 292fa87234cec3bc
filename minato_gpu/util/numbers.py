"""Numbers, and numbers of bytes, as arguments give them."""

from __future__ import annotations

import re
from numbers import Integral, Real
from typing import Any, TypeGuard


def is_whole(given: object) -> TypeGuard[int]:
    """Returns whether an argument is a whole number, which ``int`` makes Python's; True and False are none."""
    return isinstance(given, Integral) and not isinstance(given, bool)


def is_real(given: object) -> TypeGuard[float]:
    """Returns whether an argument is a real number, or NaN, which ``float`` makes Python's; True and False are none."""
    return isinstance(given, Real) and not isinstance(given, bool)


_UNITS = {unit: 1000**power for power, unit in enumerate(("", "K", "M", "G", "T"))}
_UNITS |= {f"{unit}I": 1024**power for power, unit in enumerate(("", "K", "M", "G", "T")) if power}
_SIZE = re.compile(r"([0-9.]+)\s*((?:[KMGT]I?)?)B?", re.IGNORECASE)
_EXAMPLE = "pass a number of bytes, or a text such as '32GB' or '32GiB'"


def nbytes(argument: str, size: Any, otherwise: str) -> int:
    """Returns the bytes that a whole number, or a text such as "1.5GB" (10**9 each) or "1GiB" (2**30), means.

    Raises ValueError for less than one byte or a text that means none, TypeError for anything else. Errors name
    ``argument``; of less than one byte they say ``otherwise``, what to do instead of giving it.
    """
    found = size
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        try:
            found = None if match is None else int(float(match[1]) * _UNITS[match[2].upper()])
        except (ValueError, OverflowError):
            found = None
        if found is None:
            raise ValueError(f"{argument}={size!r} is no number of bytes; {_EXAMPLE}")
    if not is_whole(found):
        raise TypeError(f"{argument}={size!r} is no number of bytes; {_EXAMPLE}")
    if found < 1:
        raise ValueError(f"{argument} must be at least 1 byte, got {size!r}; {otherwise}")
    return int(found)
