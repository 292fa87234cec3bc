"""Converts bytes, and the states of torch's generators, to text and back.

Decision: base64, so that a saved state can be written as JSON, or by ``torch.save`` and read with
``weights_only=True``. It takes a third more than the bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

import torch


def packed(data: bytes) -> str:
    """Returns bytes as base64 text."""
    return base64.b64encode(data).decode("ascii")


def packed_state(state: torch.Tensor) -> str:
    """Returns what ``Generator.get_state`` returned, as text."""
    return packed(state.numpy().tobytes())


def unpacked_state(text: str) -> torch.Tensor:
    """Returns the state that ``packed_state`` made text of. Raises ValueError if the text is not base64."""
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def packed_states(generators: Mapping[str, torch.Generator]) -> dict[str, str]:
    """Returns the present states of generators, as text."""
    return {role: packed_state(generator.get_state()) for role, generator in generators.items()}
