"""Messages that are logged once: to the logger ``minato_gpu``, as warnings where the user should know them."""

from __future__ import annotations

import logging
from functools import cache

LOGGER = logging.getLogger("minato_gpu")


@cache
def say_once(text: str, level: int = logging.WARNING) -> None:
    """Logs a text, unless this process has logged it before.

    A warning is shown on standard error where logging is not set up; ``logging.INFO`` is for what is as it should be.
    """
    LOGGER.log(level, text)
