"""The functions behind ``pipelines.speech_recognition``: reading, filter bank, masking, splicing.

Audio is float32 (samples,) within -1 to 1. Features are mel band x frame until ``permute``. A frame is centred on every
tenth millisecond; beyond the ends the signal is mirrored. ``xp`` is NumPy or CuPy.
"""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Iterator
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from minato_gpu import read_bytes
from minato_gpu.pipeline.stages import Fields, Params
from minato_gpu.util.messages import from_extra

with from_extra("pipelines"):
    from scipy import sparse

WINDOW_S = 0.025
STEP_S = 0.01
PREEMPHASIS = 0.97
# A file that claims more is refused before memory is reserved for it: four hours at 16 kHz.
MOST_SAMPLES = 1 << 28
_UNKNOWN = 2**63 - 1  # libsndfile's number of samples where a FLAC file's header has 0
# What rounding to 16 bits leaves in the upper bands. Without a floor, digital silence would make up all of a band's
# deviation, and what single precision leaves beside a loud tone would count.
FLOOR = 1e-9
EPSILON = 1e-5  # added to a band's variance: one that never changes becomes 0
_SLANEY_LINEAR_HZ, _SLANEY_BANDS, _SLANEY_RATIO = 1000.0, 15.0, 6.4  # linear up to 1 kHz, 27 steps to 6.4 times more


@cache
def library() -> Any:
    """Returns the module soundfile, imported by the first call (before workers are forked, which then share it).
    Raises ImportError where it is not installed."""
    with from_extra("pipelines"):
        return importlib.import_module("soundfile")


def read(fields: Fields, params: Params) -> Fields:
    """Reads "path": the file's samples "audio" and their "rate" (Hz). Of several channels, such as stereo, the mean.

    Raises ValueError for a file that cannot be read, is shorter than a window, or by its header has more samples than
    ``MOST_SAMPLES`` or an unknown number.
    """
    soundfile = library()
    encoded = read_bytes(fields["path"])
    if not len(encoded):
        raise ValueError("the file is empty")
    try:
        with soundfile.SoundFile(io.BytesIO(encoded.data)) as file:
            if file.frames == _UNKNOWN:
                raise ValueError(
                    "the header does not tell how many samples there are, as of a file that was written to a pipe; "
                    "write it anew, as by 'ffmpeg -i old.flac new.flac'"
                )
            if file.frames * file.channels > MOST_SAMPLES:
                raise ValueError(f"the header claims {file.frames} samples a channel; {MOST_SAMPLES} are the most")
            audio, rate = file.read(dtype="float32"), file.samplerate
    except soundfile.LibsndfileError as error:  # of which a worker could not send the text
        raise ValueError(f"libsndfile cannot read the file: {error.error_string}") from error
    if audio.ndim != 1:
        audio = audio.mean(axis=1)
    if len(audio) < WINDOW_S * rate:
        raise ValueError(
            f"the file holds {len(audio)} samples at {rate} Hz; a window of {1000 * WINDOW_S:g} ms is the least"
        )
    return {"audio": audio, "rate": np.int32(rate)}


def cost_features(fields: Fields) -> tuple[float, ...]:
    """Samples of the file: every step but the heavy one goes once through them."""
    return (float(len(fields["audio"])),)


# --- filter bank -----------------------------------------------------------------------------------------------


def framing(rate: int) -> tuple[int, int, int]:
    """Returns the samples of a window, those from one window's begin to the next, and the size of the transform: the
    next power of two."""
    window = round(WINDOW_S * rate)
    return window, round(STEP_S * rate), 1 << (window - 1).bit_length()


@lru_cache(maxsize=8)
def hann(length: int) -> Any:
    """The symmetric Hann window: float32 (length,)."""
    return np.hanning(length).astype(np.float32)


def _to_mel(hertz: float) -> float:
    if hertz < _SLANEY_LINEAR_HZ:
        return hertz / _SLANEY_LINEAR_HZ * _SLANEY_BANDS
    return _SLANEY_BANDS + 27 * math.log(hertz / _SLANEY_LINEAR_HZ, _SLANEY_RATIO)


def _to_hertz(mel: Any) -> Any:
    linear = mel / _SLANEY_BANDS * _SLANEY_LINEAR_HZ
    return np.where(mel < _SLANEY_BANDS, linear, _SLANEY_LINEAR_HZ * _SLANEY_RATIO ** ((mel - _SLANEY_BANDS) / 27))


@lru_cache(maxsize=8)
def mel_filters(rate: int, mels: int) -> Any:
    """Triangles of area 1 (in Hz), evenly spaced in mel up to half the rate: float32 (mels, bins of the spectrum).

    The mel scale of Slaney's Auditory Toolbox (1998).
    """
    size = framing(rate)[2]
    edges = _to_hertz(np.linspace(0, _to_mel(rate / 2), mels + 2))[:, None]
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    bins = np.arange(size // 2 + 1) * (rate / size)
    heights = np.minimum((bins - left) / (centre - left), (right - bins) / (right - centre))
    return (np.maximum(heights, 0) * 2 / (right - left)).astype(np.float32)


@lru_cache(maxsize=8)
def _sparse_filters(rate: int, mels: int) -> Any:
    return sparse.csr_array(mel_filters(rate, mels))


def log_mel(audio: Any, *, rate: int, mels: int) -> Any:
    """Logarithm of the energy in each mel band, frame by frame: float32 (mels, samples // step + 1)."""
    window, step, size = framing(rate)
    emphasised = audio.copy()
    emphasised[1:] -= np.float32(PREEMPHASIS) * audio[:-1]
    padded = np.pad(emphasised, (window // 2, window - window // 2), mode="reflect")
    spectrum = np.fft.rfft(sliding_window_view(padded, window)[::step] * hann(window), size)
    power = np.ascontiguousarray((spectrum.real**2 + spectrum.imag**2).T)
    # Each bin is in two bands at most. A dense product would also start BLAS's threads, and a slot is one core.
    return np.log(np.maximum(_sparse_filters(rate, mels) @ power, np.float32(FLOOR)))


def filterbank(fields: Fields, params: Params, *, rate: int, mels: int) -> Fields:
    """The logarithmic mel spectrum, each band with mean 0 and deviation 1 over the utterance."""
    levels = log_mel(fields["audio"], rate=rate, mels=mels)
    levels -= levels.mean(axis=1, keepdims=True)
    variance = np.mean(levels * levels, axis=1, keepdims=True)
    return {"features": levels / np.sqrt(variance + np.float32(EPSILON))}


def filterbank_dali(dali: ModuleType, fields: Fields, params: Params, device: str, *, rate: int, mels: int) -> Fields:
    """As ``filterbank``."""
    window, step, size = framing(rate)
    emphasised = dali.fn.preemphasis_filter(fields["audio"], preemph_coeff=PREEMPHASIS, border="zero")
    power = dali.fn.spectrogram(
        emphasised,
        nfft=size,
        window_length=window,
        window_step=step,
        window_fn=hann(window).tolist(),
        power=2,
        center_windows=True,
        reflect_padding=True,
    )
    energies = dali.fn.mel_filter_bank(power, sample_rate=rate, nfilter=mels, mel_formula="slaney", normalize=True)
    # ln x = ln 10 * log10 x
    levels = dali.fn.to_decibels(energies, multiplier=math.log(10), reference=1.0, cutoff_db=math.log(FLOOR))
    return {"features": dali.fn.normalize(levels, axes=[1], epsilon=EPSILON)}


# --- augmentation and splicing ---------------------------------------------------------------------------------


def draw_masks(rng: np.random.Generator, meta: Fields, *, frequency_masks: int, time_masks: int) -> Params:
    """Draws "frequency" and "time": for each mask two numbers in [0, 1) that decide how wide it is and where it begins.

    Shares, because how many frames there are depends on the speed that another stage draws.
    """
    return {"frequency": rng.random((frequency_masks, 2)), "time": rng.random((time_masks, 2))}


def spec_augment(xp: ModuleType, fields: Fields, params: Params, *, frequency_width: int, time_width: float) -> Fields:
    """The features with bands and stretches of time set to 0, which is their mean.

    Frequency and time masking of Park et al., "SpecAugment", Interspeech 2019, section 2, without time warping. A mask
    is up to ``frequency_width`` bands or up to the share ``time_width`` of the frames wide.
    """
    features = fields["features"].copy()
    mels, frames = features.shape
    for begin, end in _stretches(params["frequency"], frequency_width, mels):
        features[begin:end] = 0
    for begin, end in _stretches(params["time"], round(time_width * frames), frames):
        features[:, begin:end] = 0
    return {"features": features}


def _stretches(shares: Any, widest: int, size: int) -> Iterator[tuple[int, int]]:
    for wide, where in shares.tolist():
        width = min(int(wide * (widest + 1)), size)
        begin = int(where * max(1, size - width))
        yield begin, begin + width


def splice_frames(xp: ModuleType, fields: Fields, params: Params, *, splice: int) -> Fields:
    """``splice`` neighbouring frames become one, the first on top; what is missing at the end is 0."""
    features = fields["features"]
    mels, frames = features.shape
    padded = xp.zeros((mels, -(-frames // splice), splice), xp.float32)
    padded.reshape(mels, -1)[:, :frames] = features
    return {"features": xp.ascontiguousarray(padded.transpose(2, 0, 1)).reshape(splice * mels, -1)}


def permute(fields: Fields, params: Params) -> Fields:
    """Frame x feature, as recurrent networks take it."""
    return {"features": np.ascontiguousarray(fields["features"].T, np.float32)}


def permute_on_device(fields: Fields, params: Params) -> Fields:
    """As ``permute``, on tensors."""
    import torch

    return {"features": fields["features"].to(torch.float32).t().contiguous()}
