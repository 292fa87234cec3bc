"""Messages: those that are logged once, and errors for missing packages that name what brings them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

LOGGER = logging.getLogger("minato_gpu")


@cache
def say_once(text: str, level: int = logging.WARNING) -> None:
    """Logs a text, unless this process has logged it before.

    A warning is shown on standard error where logging is not set up; ``logging.INFO`` is for what is as it should be.
    """
    LOGGER.log(level, text)


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
