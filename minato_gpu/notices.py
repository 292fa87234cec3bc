"""Things that are said once: to the logger ``minato_gpu``, as warnings where the user should know them."""

from __future__ import annotations

import logging
from functools import cache

LOGGER = logging.getLogger("minato_gpu")


@cache
def say_once(text: str, level: int = logging.WARNING) -> None:
    """Say this, unless this process has said it before. A warning is shown on standard error where logging is not set
    up; ``logging.INFO`` is for what is as it should be."""
    LOGGER.log(level, text)
