"""Speech through the pipeline as a whole: the same content on either lane and any workers, batches, spoken examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader
from pipelines import example_voices
from pipelines.librispeech import LibriSpeech
from pipelines.speech_recognition import Steps, build, pad_batch

LENGTHS = (0.3, 1.1, 0.05, 0.7, 0.4, 0.9, 0.5)  # seconds


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> LibriSpeech:
    """Seven noises with transcripts of their own lengths; one file is not at 16 kHz."""
    root = tmp_path_factory.mktemp("corpus")
    utterances = []
    for number, seconds in enumerate(LENGTHS):
        rate = 22_050 if number == 3 else 16_000
        rng = np.random.default_rng(number)
        samples = rng.standard_normal(round(seconds * rate)).astype(np.float32) * 0.1
        samples *= (1 + np.sin(np.arange(len(samples)) / 2000)).astype(np.float32)
        utterances.append(("a" * (number + 1), samples, rate))
    example_voices.write_chapter(root, 1, 2, utterances)
    return LibriSpeech(root)


def batches(corpus: Any, workers: int, lanes: tuple[str, ...] = ("cpu",)) -> list[Any]:
    torch.manual_seed(3)
    pipeline = build(steps=Steps(light_rounds=5, heavy_rounds=50))
    order = [0, 1, 2, 3, 4, 5, 6, 4, 2, 0]
    own: dict[str, Any] = {"pipeline": pipeline, "lanes": lanes}
    return list(DataLoader(corpus, 3, sampler=order, collate_fn=pad_batch, num_workers=workers, **own))


def samples_of(found: list[Any]) -> list[tuple[Any, ...]]:
    """Each sample of the batches without its padding."""
    rows = []
    for batch in found:
        for n, (frames, count) in enumerate(zip(batch["frames"], batch["token_counts"], strict=True)):
            rows.append((batch["features"][n, :frames], batch["tokens"][n, :count], batch["direction"][n]))
    return rows


class TestContent:
    def test_a_sample_from_beginning_to_end(self, corpus: LibriSpeech) -> None:
        for index, seconds in enumerate(LENGTHS):
            sample = build(speeds=(1.0,)).run(corpus[index], 7)
            assert sample["features"].shape == (-(-(int(seconds * 100) + 1) // 3), 240)
            assert sample["features"].dtype == np.float32
            assert sample["tokens"].tolist() == [2] * (index + 1)
        slow = build(speeds=(0.5,)).run(corpus[1], 7)
        assert len(slow["features"]) == -(-221 // 3)

    @pytest.mark.parametrize("lanes", [("cpu", "device"), ("device",)])
    def test_lanes_change_it_by_less_than_the_tolerance(self, corpus: LibriSpeech, lanes: tuple[str, ...]) -> None:
        expected, found = samples_of(batches(corpus, 2)), samples_of(batches(corpus, 2, lanes))
        for (features, tokens, direction), (other, others, turned) in zip(expected, found, strict=True):
            assert torch.equal(tokens, others)
            assert features.shape == other.shape
            assert float((features - other).abs().max()) < 1e-3
            assert float((direction - turned).abs().max()) < 1e-4


class TestBatches:
    def test_shorter_samples_are_filled_up_with_zeros(self) -> None:
        short = {"features": np.ones((1, 2), np.float32), "tokens": np.array([5, 6, 7])}
        long = {"features": np.full((3, 2), 2, np.float32), "tokens": np.array([8])}
        batch = pad_batch([short, long])
        assert batch["features"].tolist() == [[[1, 1], [0, 0], [0, 0]], [[2, 2], [2, 2], [2, 2]]]
        assert batch["frames"].tolist() == [1, 3] and batch["token_counts"].tolist() == [3, 1]
        assert batch["tokens"].tolist() == [[5, 6, 7], [8, 0, 0]]
        assert {name: str(value.dtype) for name, value in batch.items()} == {
            "features": "torch.float32",
            "frames": "torch.int64",
            "tokens": "torch.int64",
            "token_counts": "torch.int64",
        }


class TestVoices:
    def test_what_cannot_be_spoken(self) -> None:
        with pytest.raises(ValueError, match="has no voice 'klingon-opera'"):
            example_voices.speak("yes", voice="klingon-opera")
        with pytest.raises(ValueError, match="nothing to say in ''"):
            example_voices.speak("")


class TestErrors:
    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_file_that_is_cut_off_says_so_from_a_worker_too(self, tmp_path: Path, workers: int) -> None:
        example_voices.write_chapter(tmp_path, 1, 2, [("a", np.random.default_rng(0).random(9000, np.float32), 16_000)])
        data: Any = LibriSpeech(tmp_path)
        path = Path(data[0]["path"])
        path.write_bytes(path.read_bytes()[:5000])
        with pytest.raises(ValueError, match="libsndfile cannot read the file: ") as caught:
            list(DataLoader(data, pipeline=build(), collate_fn=pad_batch, num_workers=workers))
        assert "1-2-0000.flac" in "".join((str(caught.value), *getattr(caught.value, "__notes__", ())))

    @pytest.mark.parametrize(
        "settings",
        [
            *({"rate": 10}, {"speeds": ()}, {"speeds": (1.0, -1.0)}, {"mels": 0}, {"mels": 200}, {"splice": 0}),
            *({"frequency_masks": -1}, {"frequency_width": 81}, {"time_masks": -1}, {"time_width": 1.5}),
        ],
    )
    def test_nonsense_is_refused(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ValueError):
            build(**settings)
