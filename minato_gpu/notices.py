"""Things that are said once: to the logger ``minato_gpu``, as warnings where the user should know them."""

from __future__ import annotations

import logging
from functools import cache

LOGGER = logging.getLogger("minato_gpu")


@cache
def say_once(text: str) -> None:
    """Say this, unless this process has said it before. Shown on standard error where logging is not set up."""
    LOGGER.warning(text)
