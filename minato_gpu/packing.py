"""Bytes, and the states of torch's generators, as text.

Decision: bytes are base64 strings, so that a saved state can be written as JSON, or by ``torch.save`` and read with
``weights_only=True``; a third more than the bytes themselves.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

import torch


def packed(data: bytes) -> str:
    """Bytes as a string."""
    return base64.b64encode(data).decode("ascii")


def packed_state(state: torch.Tensor) -> str:
    """What ``Generator.get_state`` returned, as text."""
    return packed(state.numpy().tobytes())


def unpacked_state(text: str) -> torch.Tensor:
    """And back. Raises ValueError where the text is not base64."""
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def packed_states(generators: Mapping[str, torch.Generator]) -> dict[str, str]:
    """The states of these generators now."""
    return {role: packed_state(generator.get_state()) for role, generator in generators.items()}
