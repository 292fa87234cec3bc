"""How many examples Hypothesis makes for a test whose examples are long: half as many as for others."""

from __future__ import annotations

from hypothesis import settings


def half(of: settings | None = None) -> settings:
    """Of the profile that is loaded, whichever that is; ``of``: settings that say other things, too."""
    whole = settings() if of is None else of
    return settings(whole, max_examples=whole.max_examples // 2)
