"""Utterances in LibriSpeech's layout: sentences of common words, spoken by a synthesiser.

The paper's light step of 0.5 s on every utterance and its heavy one of 3 s on every fifth are computations that take
``1 / SCALE`` of that here. How many rounds they need is measured once and kept beside the data (steps.json).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.published import SPREADS, costs
from minato_gpu import Pipeline
from minato_gpu.util.messages import from_extra
from pipelines import speech_recognition
from pipelines.example_voices import RATE, speak, write_chapter

with from_extra("bench"):
    from scipy import signal

SCALE = 10.0
_CHAPTER = 20  # utterances of a chapter
_WORDS = """
a all an and as at be but by can could day did do down each find first for from get go had has have he her him
his how if in into is it its just know like little long look made make many may more most my new no not now of
on one only or other out over people see she so some than that the their them then there these they this time to
two up use very was water way we were what when which who will with word work would write year you your
"""


def pipeline(directory: Path) -> Pipeline:
    """The pipeline with the light and heavy steps that belong to the data in ``directory``."""
    steps = json.loads((directory / "steps.json").read_text(encoding="utf-8"))
    return speech_recognition.build(
        steps=speech_recognition.Steps(steps["light_rounds"], steps["heavy_rounds"], steps["every"])
    )


def write(directory: Path, count: int) -> Iterator[int]:
    """Write ``count`` utterances; yields how many are done."""
    for chapter, first in enumerate(range(0, count, _CHAPTER)):
        spoken = []
        for number in range(first, min(first + _CHAPTER, count)):
            spoken.append(_spoken(chapter % 7, np.random.default_rng([0, number])))
            yield number + 1
        write_chapter(directory, 100 + chapter % 7, 1000 + chapter, spoken)
    (directory / "steps.json").write_text(json.dumps(_steps(directory)) + "\n", encoding="utf-8")


def _spoken(speaker: int, rng: np.random.Generator) -> tuple[str, Any, int]:
    """A sentence, its sound, Hz: speech with a little noise, so that FLAC finds it as hard as a recording."""
    words = " ".join(rng.choice(_WORDS.split(), int(rng.integers(24, 36))))
    audio, rate = speak(words, pitch=30 + 8 * speaker)
    audio = signal.resample_poly(audio, RATE, rate)
    return words, audio + rng.standard_normal(len(audio), dtype=np.float32) * np.float32(1e-3), RATE


def _steps(directory: Path) -> dict[str, int]:
    """Rounds of the steps, so that an utterance takes the published times over ``SCALE`` in all."""
    dataset = speech_recognition.dataset(directory)
    several = range(0, len(dataset), max(1, len(dataset) // 40))
    rest = float(np.median(costs(dataset, speech_recognition.pipeline(), several)))
    spread = SPREADS["speech_recognition"]
    light_s = max(0.0, 1e-3 * spread.median / SCALE - rest)
    heavy_s = 1e-3 * (spread.p90 - spread.median) / SCALE  # on top of the light step
    rounds = speech_recognition.rounds_for
    return {"light_rounds": rounds(light_s), "heavy_rounds": rounds(heavy_s), "every": 5}
