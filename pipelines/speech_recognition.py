"""Speech for training a transducer: read, resample, mel filter bank, SpecAugment, frame splicing.

The steps and their settings are those of MLPerf Training's RNN-T on LibriSpeech (mlcommons/training,
rnn_speech_recognition/pytorch): three speeds, 80 logarithmic mel bands with mean 0 and deviation 1, 2 masks of up to
20 bands and 10 of up to 3 % of the frames, 3 frames spliced into one. Not as there: windows are 25 ms long instead of
20, tokens are characters instead of pieces of words, silence is not trimmed, and no noise is added against digital
silence, which a floor of the energy stands in for. MinatoLoader (EuroSys 2026) measures this workload with a light and
a heavy step more; see ``Steps``.

A file of several channels, such as stereo, is mixed down to one: the mean of them.

Utterances differ in length, so a loader needs ``collate_fn=pad_batch``:

    DataLoader(data, 24, pipeline=speech_recognition.pipeline(), collate_fn=speech_recognition.pad_batch, ...)

Decisions:
- Resampling is one polyphase filter for the file's rate and the speed together, as SciPy designs it. DALI's own
  resampler has another filter.
- Masks are drawn as shares of the number of frames, which depends on the drawn speed.
- On a GPU the audio goes from CuPy to DALI by way of the host (see ``minato_gpu.device.segments``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from minato_gpu import shared_empty
from minato_gpu.device.values import to_numpy
from minato_gpu.pipeline.pipeline import CupyFunction, DaliFragment, Field, Pipeline, Stage, Tolerance, TorchFunction

from . import speech_resampling, speech_stages, speech_steps
from .example_voices import write as example_data
from .librispeech import LibriSpeech
from .speech_steps import Steps, rounds_for

__all__ = ["LibriSpeech", "Steps", "build", "dataset", "example_data", "pad_batch", "pipeline", "rounds_for"]

_AUDIO_LEVEL = 2 / 255  # samples lie within -1 to 1
_LEVEL = 6 / 255  # features have mean 0 and deviation 1: nearly all lie within three deviations of 0
# Both implementations are float32 all the way and add in another order. Of the filter bank that makes at most 0.01
# levels for speech, and up to 1 beside a pure tone, where all else is rounding. On a GPU it has yet to be measured.
_RESAMPLED = {"cpu": Tolerance(0.001, 0.0001), "cuda": Tolerance(0.001, 0.0001)}
_SPECTRAL = {"cpu": Tolerance(1, 0.1), "cuda": Tolerance(1, 0.1)}


def build(
    rate: int = 16_000,
    *,
    speeds: tuple[float, ...] = (0.9, 1.0, 1.1),
    mels: int = 80,
    frequency_masks: int = 2,
    frequency_width: int = 20,
    time_masks: int = 10,
    time_width: float = 0.03,
    splice: int = 3,
    steps: Steps | None = None,
) -> Pipeline:
    """The training pipeline: ``{"path", "tokens", "index"}`` to ``{"features", "tokens"}``, both of any length.

    features: float32 (frames, ``splice`` * ``mels``), tokens: int64 (characters,), as the data set gives them. With
    ``steps`` also direction: float32 (``mels``,), see ``pipelines.speech_steps``.
    ``rate``: Hz, to which every file is brought; ``speeds``: one is drawn for each sample, if there are several; each
    is taken as the nearest fraction with a denominator up to 100. ``frequency_masks``, ``time_masks``: how many there
    are; ``frequency_width``: the most bands of one; ``time_width``: the largest share of the frames of one.
    Raises ValueError for values that make no sense, ImportError without soundfile.
    """
    _check(rate, speeds, mels, (frequency_masks, frequency_width, time_masks), time_width, splice)
    speech_stages.library()
    stages = (
        *_spectral_stages(rate, speeds, mels),
        *_augmenting_stages((frequency_masks, frequency_width), (time_masks, time_width), splice, mels),
        *(() if steps is None else speech_steps.stages(steps, mels)),
    )
    inputs = {"path": Field(object), "tokens": Field(np.int64, (None,)), "index": Field(np.int64)}
    outputs = ("features", "tokens") if steps is None else ("features", "tokens", "direction")
    return Pipeline(stages, outputs=outputs, name="speech_recognition", inputs=inputs)


pipeline, dataset = build, LibriSpeech  # with their default settings: see ``minato_gpu.pipelines``


def _spectral_stages(rate: int, speeds: tuple[float, ...], mels: int) -> tuple[Stage, ...]:
    audio = Field(np.float32, (None,), level=_AUDIO_LEVEL)
    return (
        Stage(
            "read",
            reads=("path",),
            writes={"audio": audio, "rate": Field(np.int32)},
            cpu=speech_stages.read,
        ),
        _resample_stage(rate, tuple(speeds), audio),
        Stage(
            "filterbank",
            reads=("audio",),
            writes={"features": Field(np.float32, (mels, None), layout="ft", level=_LEVEL)},
            cpu=partial(speech_stages.filterbank, rate=rate, mels=mels),
            device=DaliFragment(partial(speech_stages.filterbank_dali, rate=rate, mels=mels)),
            tolerance=_SPECTRAL,
        ),
    )


def _resample_stage(rate: int, speeds: tuple[float, ...], audio: Field) -> Stage:
    only = speeds[0] if len(speeds) == 1 else None  # nothing to draw: a cache may keep all that comes before the masks
    return Stage(
        "resample",
        reads=("audio",) if only is None else ("audio", "rate"),
        writes={"audio": audio},
        cpu=partial(speech_resampling.resample, rate=rate, speed=only),
        device=CupyFunction(partial(speech_resampling.resample_on_device, rate=rate, speed=only)),
        draw=partial(speech_resampling.draw_speed, rate=rate, speeds=speeds) if only is None else None,
        meta=("rate",) if only is None else (),
        features=speech_stages.cost_features,
        feature_names=("samples",),
        tolerance=_RESAMPLED,
    )


def _augmenting_stages(
    frequency: tuple[int, int], time: tuple[int, float], splice: int, mels: int
) -> tuple[Stage, ...]:
    masks, width = frequency
    stretches, share = time
    augment = CupyFunction(partial(speech_stages.spec_augment, frequency_width=width, time_width=share))
    splice_frames = CupyFunction(partial(speech_stages.splice_frames, splice=splice))
    return (
        Stage(
            "spec_augment",
            reads=("features",),
            writes={"features": Field(np.float32, (mels, None), layout="ft", level=_LEVEL)},
            cpu=augment.on_cpu,
            device=augment,
            draw=partial(speech_stages.draw_masks, frequency_masks=masks, time_masks=stretches),
        ),
        Stage(
            "splice",
            reads=("features",),
            writes={"features": Field(np.float32, (splice * mels, None), layout="ft", level=_LEVEL)},
            cpu=splice_frames.on_cpu,
            device=splice_frames,
        ),
        Stage(
            "permute",
            reads=("features",),
            writes={"features": Field(np.float32, (None, splice * mels), layout="tf", level=_LEVEL)},
            cpu=speech_stages.permute,
            device=TorchFunction(speech_stages.permute_on_device),
        ),
    )


def _check(
    rate: int, speeds: tuple[float, ...], mels: int, masks: tuple[int, int, int], time_width: float, splice: int
) -> None:
    if rate < 1000:
        raise ValueError(f"rate must be at least 1000 Hz, got {rate}")
    if not speeds or min(speech_resampling.speed_fraction(speed) for speed in speeds) <= 0:
        raise ValueError(f"speeds must name at least one speed above 0, got {speeds}")
    if mels < 1 or splice < 1:
        raise ValueError(f"mels and splice must be at least 1, got {mels} and {splice}")
    if not speech_stages.mel_filters(rate, mels).any(axis=1).all():
        raise ValueError(f"{mels} mel bands at {rate} Hz are narrower than the spectrum's bins; ask for fewer")
    if min(masks) < 0 or masks[1] > mels or not 0 <= time_width <= 1:
        raise ValueError(
            f"masks must be at least 0, at most {mels} bands and all of the time wide, got {masks} and {time_width}"
        )


def pad_batch(samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Samples of this pipeline as one batch, for ``collate_fn``; the shorter ones are filled up with 0 at the end.

    features: float32 (samples, most frames, splice * mels), frames: int64 (samples,), tokens: int64 (samples, most
    tokens), token_counts: int64 (samples,), and direction: float32 (samples, mels) where the samples have one.
    """
    features = [to_numpy(sample["features"]) for sample in samples]
    tokens = [to_numpy(sample["tokens"]) for sample in samples]
    batch = {
        "features": _padded(features),
        "frames": torch.tensor([len(rows) for rows in features]),
        "tokens": _padded(tokens),
        "token_counts": torch.tensor([len(rows) for rows in tokens]),
    }
    if "direction" in samples[0]:
        batch["direction"] = torch.from_numpy(np.stack([to_numpy(sample["direction"]) for sample in samples]))
    return batch


def _padded(rows: Sequence[Any]) -> torch.Tensor:
    shape = (len(rows), max(len(row) for row in rows), *rows[0].shape[1:])
    whole = shared_empty(shape, torch.from_numpy(rows[0][:0]).dtype)
    for place, row in zip(whole.numpy(), rows, strict=True):
        place[: len(row)] = row
        place[len(row) :] = 0
    return whole
