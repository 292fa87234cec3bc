"""A package that is missing is told of by the extra of minato_gpu that brings it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def from_extra(*extras: str) -> Iterator[None]:
    """Around imports of what any of ``extras`` brings: where it is missing, the error says what to install.

    It stays a ModuleNotFoundError with the missing module's ``name``. What an import raises otherwise goes through.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        install = " or ".join(f"'minato-gpu[{extra}]'" for extra in extras)
        said = f"No module named {error.name!r}: it comes with pip install {install}"
        raise ModuleNotFoundError(said, name=error.name, path=error.path) from error
