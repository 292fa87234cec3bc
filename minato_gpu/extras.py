"""Errors for missing packages that name the extra of minato_gpu which brings them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def from_extra(*extras: str) -> Iterator[None]:
    """Wraps imports of packages that one of ``extras`` brings: if one is missing, the error says what to install.

    It stays a ModuleNotFoundError with the missing module's ``name``. Other errors pass through.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        install = " or ".join(f"'minato-gpu[{extra}]'" for extra in extras)
        said = f"No module named {error.name!r}: it comes with pip install {install}"
        raise ModuleNotFoundError(said, name=error.name, path=error.path) from error
