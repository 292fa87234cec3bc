"""A sample's random streams."""

from __future__ import annotations

import numpy as np
import pytest

from minato_gpu.samples import stream

_LARGEST = (1 << 64) - 1


@pytest.mark.parametrize("seed", [0, 5, (1 << 63) + 11, _LARGEST])
@pytest.mark.parametrize("number", [0, 1, 9])
def test_a_stream_is_philox_with_seed_and_number_as_its_key(seed: int, number: int) -> None:
    expected = np.random.Generator(np.random.Philox(key=np.array([seed, number], np.uint64)))
    found = stream(seed, number)
    assert str(found.bit_generator.state) == str(expected.bit_generator.state)
    for _ in range(2):
        assert found.random(9).tolist() == expected.random(9).tolist()
        assert (
            found.integers(7, size=5, dtype=np.uint8).tolist() == expected.integers(7, size=5, dtype=np.uint8).tolist()
        )
        assert found.standard_normal(3, np.float32).tolist() == expected.standard_normal(3, np.float32).tolist()


def test_streams_do_not_share_what_they_have_drawn() -> None:
    one, other = stream(1), stream(1)
    first = one.random(100)
    assert other.random(100).tolist() == first.tolist()


def test_a_stream_has_no_children() -> None:
    """They would come of the system's entropy: others each time (P2)."""
    with pytest.raises(TypeError, match="spawn"):
        stream(1).spawn(2)
