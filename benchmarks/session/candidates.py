"""What is told of a candidate in a result: the settings that may differ between two candidates of its kind."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

_SAME = ("name", "package", "ordered", "own_draws", "size")


def settings_of(candidate: Any) -> dict[str, Any]:
    """The fields of a candidate (a dataclass) that are settings."""
    return {name: value for name, value in asdict(candidate).items() if name not in _SAME}
