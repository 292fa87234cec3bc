"""Writes a few spoken utterances in LibriSpeech's layout, for checks and tests.

The voices are espeak-ng's, a formant synthesiser. The package espeakng-loader brings its library and its data; both are
under the GPL and are not part of this project.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minato_gpu.util.messages import from_extra

from . import speech_stages

with from_extra("pipelines"):
    from scipy import signal

RATE = 16_000  # of LibriSpeech

# values of enumerations in espeak-ng's speak_lib.h
_SYNCHRONOUS, _DO_NOT_EXIT, _UTF8 = 2, 0x8000, 1
_SPEED, _PITCH = 1, 3
_PATH_BYTES = 160  # its buffer for the folder of its data; a longer path is cut off
_TAKE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
_lock = threading.Lock()  # the library has one state for the whole process

_BOXES = (
    "nobody had counted the boxes so nobody could say whether one of them was gone and the captain who had signed for "
    "all of them walked up and down the quay until it rained"
)
_HARBOUR = ("yes", "the harbour lay still and only one lamp was lit", _BOXES)
_KEEPER = ("it isn't far", "she asked for the key twice and then for the keeper's name")
_SHIPS = ("seven ships went out in the morning and six of them came home before the storm",)
# speaker, chapter, voice, words a minute, pitch, utterances
_SPEAKERS = (
    (11, 1001, "en-us", 160, 40, _HARBOUR),
    (12, 1002, "en-gb-x-rp", 200, 70, _KEEPER),
    (13, 1003, "en-us+f2", 175, 60, _SHIPS),
)
_OTHER_RATE = "this one was recorded at another rate than all the others"


def write(directory: str | Path) -> None:
    """Writes utterances of 0.4 to 10 seconds by four speakers; the last is not at 16 kHz."""
    for speaker, chapter, voice, speed, pitch, texts in _SPEAKERS:
        spoken = [(text, *speak(text, voice=voice, speed=speed, pitch=pitch)) for text in texts]
        resampled = [(text, signal.resample_poly(audio, RATE, rate), RATE) for text, audio, rate in spoken]
        write_chapter(Path(directory), speaker, chapter, resampled)
    write_chapter(Path(directory), 14, 1004, [(_OTHER_RATE, *speak(_OTHER_RATE))])


def write_chapter(
    directory: Path, speaker: int, chapter: int, utterances: Sequence[tuple[str, NDArray[np.float32], int]]
) -> None:
    """Writes one folder of FLAC files of 16 bits with its transcript: (text, float32 samples, rate) in their order."""
    folder = directory / str(speaker) / str(chapter)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (text, audio, rate) in enumerate(utterances):
        name = f"{speaker}-{chapter}-{number:04}"
        speech_stages.library().write(folder / f"{name}.flac", audio, rate, subtype="PCM_16")
        lines.append(f"{name} {text.upper()}\n")
    (folder / f"{speaker}-{chapter}.trans.txt").write_text("".join(lines), encoding="utf-8")


def speak(text: str, *, voice: str = "en-us", speed: int = 175, pitch: int = 50) -> tuple[NDArray[np.float32], int]:
    """The text as speech: samples, float32 (n,) within -1 to 1, and their rate in Hz.

    ``voice``: a name of espeak-ng, such as "en-gb-x-rp" or "en-us+f2"; ``speed``: words a minute, 80 to 450; ``pitch``:
    0 to 99. Voices waver, and how is not started anew: the same text sounds a little different at every call, but the
    same calls in a new process give the same samples.
    Raises ImportError without the package espeakng-loader, and ValueError for a voice that espeak-ng does not have, or
    a text in which it finds nothing to say.
    """
    library, rate = _espeak()
    parts: list[NDArray[np.int16]] = []

    def take(samples: Any, count: int, events: Any) -> int:
        if samples and count:
            parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    callback = _TAKE(take)  # the library keeps no reference
    with _lock:
        if library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ValueError(f"espeak-ng has no voice {voice!r}")
        library.espeak_SetParameter(_SPEED, speed, 0)
        library.espeak_SetParameter(_PITCH, pitch, 0)
        library.espeak_SetSynthCallback(callback)
        data = text.encode()
        if library.espeak_Synth(data, len(data) + 1, 0, 1, 0, _UTF8, None, None) != 0:
            raise RuntimeError(f"espeak-ng could not speak {text!r}")
    spoken = np.concatenate(parts) if parts else np.zeros(0, np.int16)
    if not spoken.any():
        raise ValueError(f"espeak-ng finds nothing to say in {text!r}")
    return np.divide(spoken, 32768, dtype=np.float32), rate


@lru_cache(maxsize=1)
def _espeak() -> tuple[Any, int]:
    """The library, ready to speak, and its sample rate."""
    with from_extra("demo"):
        loader = importlib.import_module("espeakng_loader")
    data = Path(loader.get_data_path())
    if len(os.fsencode(data)) >= _PATH_BYTES:
        raise ValueError(f"espeak-ng's data must lie at a path shorter than {_PATH_BYTES} bytes, not at {str(data)!r}")
    library = ctypes.CDLL(str(loader.get_library_path()))
    size, text, number = ctypes.c_size_t, ctypes.c_char_p, ctypes.c_uint
    library.espeak_Synth.argtypes = [text, size, number, ctypes.c_int, number, number, ctypes.c_void_p, ctypes.c_void_p]
    rate = library.espeak_Initialize(_SYNCHRONOUS, 0, os.fsencode(data.parent), _DO_NOT_EXIT)
    if rate <= 0:
        raise RuntimeError(f"espeak-ng cannot be started with its data in {str(data)!r}")
    library.espeak_ng_SetRandSeed(1)  # else by the clock
    return library, rate
