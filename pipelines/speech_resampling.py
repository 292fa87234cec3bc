"""Speed and rate of speech in one step: a polyphase filter as SciPy designs it, by SciPy and over an array module."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from minato_gpu.pipeline.stages import Fields, Params
from minato_gpu.util.messages import from_extra

with from_extra("pipelines"):
    from scipy import signal

_DENOMINATOR = 100  # the finest speed; longer filters would bring nothing that is heard


def speed_fraction(speed: float) -> Fraction:
    """The speed as a fraction that a filter can be made for, to a hundredth part or finer."""
    return Fraction(speed).limit_denominator(_DENOMINATOR)


def draw_speed(rng: np.random.Generator, meta: Fields, *, rate: int, speeds: tuple[float, ...]) -> Params:
    """Draws "up" and "down", which resample the file to ``rate`` and play it at one of ``speeds``, pitch included.

    Ko, Peddinti, Povey and Khudanpur, "Audio augmentation for speech recognition", Interspeech 2015.
    """
    ratio = _ratio(meta, rate, speeds[int(rng.integers(len(speeds)))])
    return {"up": ratio.numerator, "down": ratio.denominator}


def _ratio(fields: Fields, rate: int, speed: float) -> Fraction:
    return Fraction(rate, int(fields["rate"])) / speed_fraction(speed)


def _up_and_down(fields: Fields, params: Params, rate: int, speed: float | None) -> tuple[int, int]:
    if speed is None:
        return int(params["up"]), int(params["down"])
    return _ratio(fields, rate, speed).as_integer_ratio()


@lru_cache(maxsize=32)
def taps(up: int, down: int) -> Any:
    """The low-pass filter that ``scipy.signal.resample_poly`` designs, made once for each ratio: float32 (odd,)."""
    largest = max(up, down)
    return signal.firwin(20 * largest + 1, 1 / largest, window=("kaiser", 5.0)).astype(np.float32)


def resample(fields: Fields, params: Params, *, rate: int = 0, speed: float | None = None) -> Fields:
    """Resamples the audio to the drawn "up" / "down" times its rate; or, where ``speed`` is the only one and nothing is
    drawn, to ``rate`` and played at that speed."""
    up, down = _up_and_down(fields, params, rate, speed)
    if up == down:
        return {"audio": fields["audio"]}
    return {"audio": signal.resample_poly(fields["audio"], up, down, window=taps(up, down))}


@lru_cache(maxsize=32)
def _phases(up: int, down: int) -> Any:
    """The taps that meet input samples, not inserted zeros, for each of the ``up`` places between those.

    float32 (taps, phases): newest sample first.
    """
    whole = taps(up, down) * np.float32(up)
    return np.pad(whole, (0, -len(whole) % up)).reshape(-1, up)


def resample_on_device(
    xp: ModuleType, fields: Fields, params: Params, *, rate: int = 0, speed: float | None = None
) -> Fields:
    """As ``resample``, over an array module.

    Tap by tap: to gather the samples for all taps at once would take 20 to 50 times the memory.
    """
    audio, (up, down) = fields["audio"], _up_and_down(fields, params, rate, speed)
    if up == down:
        return {"audio": audio}
    phases = _phases(up, down)
    weights, reach = xp.asarray(phases), len(phases)
    count = -(-audio.shape[0] * up // down)
    at = xp.arange(count, dtype=xp.int64) * down + len(taps(up, down)) // 2
    phase, newest = at % up, at // up + reach
    padded = xp.concatenate((xp.zeros(reach, xp.float32), audio, xp.zeros(reach, xp.float32)))
    resampled = xp.zeros(count, xp.float32)
    for tap in range(reach):
        resampled += padded[newest - tap] * weights[tap][phase]
    return {"audio": resampled}
