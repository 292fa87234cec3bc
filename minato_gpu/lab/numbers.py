"""Numbers as people read them: written out, with commas between thousands, never as a power of ten."""

from __future__ import annotations

import math
from collections.abc import Iterable

_DIGITS = 3  # significant ones of a number by itself; behind the point, of numbers around 1 in a column
_MOST = 9  # behind the point


def number(value: float, digits: int | None = None) -> str:
    """Returns a number in text, with ``digits`` behind the point; None: as many as make three significant ones.

    Then no digit before the point is rounded away: 0.00123, 12.3, 1,163.
    """
    if digits is not None:
        return f"{value:,.{digits}f}"
    if not value or not math.isfinite(value):
        return f"{value:g}"
    wanted = _DIGITS - 1 - math.floor(math.log10(abs(value)))
    text = f"{value:,.{min(max(wanted, 0), _MOST)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def shared_digits(values: Iterable[float]) -> int:
    """Returns how many digits behind the point a column needs: as in 1234, 123.4, 12.34, 1.234, 0.123, 0.0123.

    The largest decides; the smallest gets a digit that is not nought, where up to three behind the point do that. 0 if
    all are whole, or NaN or infinite.
    """
    finite = [abs(value) for value in values if math.isfinite(value) and value]
    if all(value == int(value) for value in finite):
        return 0
    largest, smallest = (math.floor(math.log10(value)) for value in (max(finite), min(finite)))
    wanted = _DIGITS - largest if largest >= 0 else _DIGITS - 1 - largest
    return min(max(wanted, min(-smallest, _DIGITS), 0), _MOST)
