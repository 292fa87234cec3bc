"""Keeps an error to raise it later."""

from __future__ import annotations

import traceback


class DeferredError:
    """Keeps one error until the consumer asks for more."""

    def __init__(self) -> None:
        self.kept: Exception | None = None

    def keep(self, error: Exception) -> None:
        """Has the next ``raise_kept`` raise this error, in place of one that was kept before. Its traceback becomes
        text, in a note."""
        self.kept = _without_frames(error)

    def raise_kept(self) -> None:
        """Raises what was kept, once; else does nothing."""
        error, self.kept = self.kept, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback knows this frame


def _without_frames(error: Exception) -> Exception:
    """Returns the error without its frames, and with a note that says where it was raised.

    Each frame knows the one that called it, and so on up to the consumer's: kept, they would keep the iterator of a
    consumer who never asks again, and with it workers and memory.
    """
    where = "".join(traceback.format_exception(error)).rstrip()
    error.add_note(f"Raised while a batch lay ready, and kept until that was delivered. Original traceback:\n{where}")
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
    return error
