"""The light and the heavy step: power iteration against NumPy's eigenvectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipelines import speech_steps
from pipelines.speech_steps import Steps


def rows(loudness: float) -> Any:
    """Spliced frames in which all bands share as much loudness: float32 (40, 240)."""
    rng = np.random.default_rng(0)
    frames = rng.standard_normal((120, 80)) + loudness * rng.standard_normal((120, 1)) * np.linspace(0.5, 1, 80)
    return frames.astype(np.float32).reshape(40, 240)


def test_many_rounds_find_the_main_direction() -> None:
    fields = {"features": rows(loudness=1.0)}
    bands = fields["features"].reshape(-1, 80)
    found = speech_steps.light(np, fields, {}, mels=80, rounds=500)
    expected = np.cov(bands, rowvar=False, bias=True)
    np.testing.assert_allclose(found["covariance"], expected, atol=1e-5)
    main = np.linalg.eigh(expected)[1][:, -1]
    np.testing.assert_allclose(found["direction"], main * np.sign(main.sum()), atol=1e-4)
    assert found["direction"].dtype == np.float32


def test_the_heavy_step_goes_on_where_the_light_one_ended_for_every_fifth() -> None:
    steps = Steps(light_rounds=2, heavy_rounds=3)
    # without a direction that stands out, so that every round still changes it
    fields = {"features": rows(loudness=0.0)}
    light = speech_steps.light(np, fields, {}, mels=80, rounds=2)
    whole = speech_steps.light(np, fields, {}, mels=80, rounds=5)
    assert not np.allclose(light["direction"], whole["direction"], atol=1e-4)
    for index in range(12):
        got = speech_steps.heavy(np, {**light, "index": index}, {}, steps=steps)["direction"]
        expected = whole if index in (4, 9) else light
        np.testing.assert_allclose(got, expected["direction"], atol=1e-6)
        assert speech_steps.cost_features({"index": index}, steps=steps) == (float(index in (4, 9)),)


def test_the_sign_and_silence() -> None:
    matrix = np.diag([2.0, 1.0]).astype(np.float32)
    start = np.array([-1, 0.1], np.float32)
    np.testing.assert_allclose(speech_steps.power_iteration(np, matrix, start, 60), [1, 0], atol=1e-6)
    for rounding in (0, 5e-4):  # of the band's mean
        silence = {"features": np.full((4, 240), rounding, np.float32)}
        silence["features"][:2] = 0  # masked
        assert np.abs(speech_steps.light(np, silence, {}, mels=80, rounds=10)["direction"]).max() < 1e-6


def test_rounds_are_measured() -> None:
    one = speech_steps.rounds_for(1.0, trials=3, probe=200)
    assert 1000 < one < 10_000_000
    assert speech_steps.rounds_for(0.0, trials=1, probe=10) == 1


@pytest.mark.parametrize("settings", [(-1, 0), (0, -1), (0, 0, 0)])
def test_nonsense_is_refused(settings: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rounds must be at least 0 and every at least 1"):
        Steps(*settings)
