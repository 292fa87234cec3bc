"""Speech: the steps of its pipeline, each against an independent way to the same result, and the whole pipeline."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy

from minato_gpu import DataLoader
from minato_gpu.lab import parity
from minato_gpu.pipeline.pipeline import DaliFragment, Field, Pipeline, Stage
from pipelines import example_voices, speech_recognition, speech_resampling, speech_stages, speech_steps
from pipelines.librispeech import LibriSpeech
from pipelines.speech_recognition import Steps, build, pad_batch

soundfile: Any = pytest.importorskip("soundfile")
RATE = 16_000


def noise(seconds: float, seed: int = 0) -> Any:
    """Noise that swells and fades, rounded to 16 bits as in a file."""
    rng = np.random.default_rng(seed)
    samples = rng.standard_normal(round(seconds * RATE)) * 0.1
    samples *= 1 + np.sin(np.arange(len(samples)) / 3000)
    return (np.round(samples * 32768) / 32768).astype(np.float32)


def tone(rate: int) -> Any:
    """Half a second of 440 Hz."""
    return np.sin(2 * np.pi * 440 * np.arange(rate // 2) / rate).astype(np.float32) / 2


def stage(name: str, **settings: Any) -> Stage:
    (found,) = [one for one in speech_recognition.build(**settings).stages if one.name == name]
    return found


class TestReading:
    def test_samples_and_rate(self, tmp_path: Path) -> None:
        soundfile.write(tmp_path / "a.flac", tone(22_050), 22_050)
        fields = speech_stages.read({"path": str(tmp_path / "a.flac")}, {})
        assert fields["rate"] == 22_050 and fields["rate"].dtype == np.int32
        assert fields["audio"].dtype == np.float32
        np.testing.assert_allclose(fields["audio"], tone(22_050), atol=1 / 32768)

    def test_stereo_is_mixed_down(self, tmp_path: Path) -> None:
        left, right = np.random.default_rng(0).uniform(-1, 1, (2, 800)).astype(np.float32)
        soundfile.write(tmp_path / "a.wav", np.stack([left, right], axis=1), RATE, subtype="FLOAT")
        found = speech_stages.read({"path": str(tmp_path / "a.wav")}, {})["audio"]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, (left + right) / 2)

    @pytest.mark.parametrize(
        ("samples", "message"),
        [
            (np.zeros(0), "the file is empty"),
            (np.zeros(399), "the file holds 399 samples at 16000 Hz; a window of 25 ms is the least"),
        ],
    )
    def test_files_that_cannot_be_used(self, tmp_path: Path, samples: Any, message: str) -> None:
        soundfile.write(tmp_path / "a.flac", samples, RATE)
        with pytest.raises(ValueError, match=message):
            speech_stages.read({"path": str(tmp_path / "a.flac")}, {})

    def test_a_header_that_does_not_know_how_many_samples_there_are(self, tmp_path: Path) -> None:
        """As an encoder leaves it that writes to a pipe."""
        soundfile.write(tmp_path / "a.flac", tone(RATE), RATE)
        data = bytearray((tmp_path / "a.flac").read_bytes())
        data[21] &= 0xF0
        data[22:26] = bytes(4)
        (tmp_path / "a.flac").write_bytes(data)
        with pytest.raises(ValueError, match=r"the header does not tell how many samples there are.*write it anew"):
            speech_stages.read({"path": str(tmp_path / "a.flac")}, {})

    def test_a_file_that_claims_too_much(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        soundfile.write(tmp_path / "a.flac", tone(RATE), RATE)
        monkeypatch.setattr(speech_stages, "MOST_SAMPLES", 7_999)
        with pytest.raises(ValueError, match="the header claims 8000 samples a channel; 7999 are the most"):
            speech_stages.read({"path": str(tmp_path / "a.flac")}, {})


@pytest.mark.parametrize(("up", "down"), [(10, 9), (10, 11), (1, 1), (1, 3), (2, 1), (320, 441), (3200, 4851)])
@pytest.mark.parametrize("length", [1, 7, 4001])
def test_both_implementations_of_resampling_are_scipys(up: int, down: int, length: int) -> None:
    audio = noise(length / RATE)
    params = {"up": np.int32(up), "down": np.int32(down)}
    expected = scipy.signal.resample_poly(audio, up, down)
    got = speech_resampling.resample({"audio": audio}, params)["audio"]
    assert np.array_equal(got, expected)
    got = speech_resampling.resample_on_device(np, {"audio": audio}, params)["audio"]
    assert got.dtype == np.float32 and got.shape == expected.shape
    np.testing.assert_allclose(got, expected, atol=2e-7)


class TestFilterBank:
    def test_the_energy_is_what_the_definition_says(self) -> None:
        audio = noise(0.3)
        emphasised = audio.astype(np.float64)
        emphasised[1:] -= 0.97 * audio[:-1].astype(np.float64)
        frame = emphasised[15 * 160 - 200 : 15 * 160 + 200] * np.hanning(400)
        power = np.abs(np.exp(-2j * np.pi * np.outer(np.arange(257), np.arange(400)) / 512) @ frame) ** 2
        expected = np.log(speech_stages.mel_filters(RATE, 80) @ power)
        np.testing.assert_allclose(speech_stages.log_mel(audio, rate=RATE, mels=80)[:, 15], expected, atol=1e-4)

    @pytest.mark.parametrize(
        ("operator", "options"),
        [
            (None, {}),
            ("preemphasis_filter", {"preemph_coeff": 0.95}),
            ("spectrogram", {"window_fn": np.hamming(400).tolist()}),
            ("spectrogram", {"window_step": 161}),
            ("spectrogram", {"nfft": 1024}),
            ("spectrogram", {"center_windows": False}),
            ("spectrogram", {"reflect_padding": False}),
            ("mel_filter_bank", {"mel_formula": "htk"}),
            ("to_decibels", {"cutoff_db": -10.0}),
            ("normalize", {"axes": [0, 1]}),
        ],
    )
    def test_dali_means_the_same_and_any_other_setting_is_caught(
        self, operator: str | None, options: dict[str, Any]
    ) -> None:
        device = DaliFragment(partial(_changed, operator=operator, options=options, rate=RATE, mels=80))
        one = dataclasses.replace(stage("filterbank"), device=device)
        pipeline = Pipeline((one,), outputs=("features",), inputs={"audio": Field(np.float32, (None,))})
        # one sample is loud at the beginning, where the border of the emphasis shows
        samples: Any = [{"audio": noise(length, seed)} for seed, length in enumerate((0.3, 0.05, 0.777))]
        samples.append({"audio": np.concatenate((np.full(1, 0.9, np.float32), noise(0.2)))})
        rows = parity.check(pipeline, samples)
        assert all(row.passed for row in rows) == (operator is None), rows


def _changed(
    dali: Any, fields: Any, params: Any, device: str, *, operator: str | None, options: Any, rate: int, mels: int
) -> Any:
    """The fragment with other options for one of its operators."""
    names = ("preemphasis_filter", "spectrogram", "mel_filter_bank", "to_decibels", "normalize")
    fn = SimpleNamespace(**{name: getattr(dali.fn, name) for name in names})
    if operator is not None:
        original = getattr(dali.fn, operator)
        setattr(fn, operator, lambda *nodes, **given: original(*nodes, **{**given, **options}))
    module: Any = SimpleNamespace(fn=fn)
    return speech_stages.filterbank_dali(module, fields, params, device, rate=rate, mels=mels)


class TestAugmentation:
    def test_what_is_drawn_is_zero_and_nothing_else(self) -> None:
        features = np.ones((80, 200), np.float32)
        params = {"frequency": np.array([[0.5, 0.25]]), "time": np.array([[0.999, 0.0], [0.5, 0.9999]])}
        masked = speech_stages.spec_augment(np, {"features": features}, params, frequency_width=20, time_width=0.05)
        expected = np.ones((80, 200), np.float32)
        expected[17:27] = 0  # 10 of 0 to 20 bands, a quarter of the way through 70 places
        expected[:, :10] = 0  # the widest: 5 % of 200
        expected[:, 194:199] = 0
        assert np.array_equal(masked["features"], expected)
        assert (features == 1).all()

    def test_splicing_stacks_neighbours_and_fills_up_the_end(self) -> None:
        features = np.array([[1, 2, 3, 4, 5], [10, 20, 30, 40, 50]], np.float32)
        spliced = speech_stages.splice_frames(np, {"features": features}, {}, splice=3)["features"]
        assert spliced.tolist() == [[1, 4], [10, 40], [2, 5], [20, 50], [3, 0], [30, 0]]
        rows = speech_stages.permute({"features": spliced}, {})["features"]
        assert rows.tolist() == [[1, 10, 2, 20, 3, 30], [4, 40, 5, 50, 0, 0]] and rows.flags.c_contiguous
        same = speech_stages.splice_frames(np, {"features": features}, {}, splice=1)["features"]
        assert np.array_equal(same, features)


# --- the light and the heavy step --------------------------------------------------------------------------------


def test_rounds_are_measured() -> None:
    one = speech_steps.rounds_for(1.0, trials=3, probe=200)
    assert 1000 < one < 10_000_000
    assert speech_steps.rounds_for(0.0, trials=1, probe=10) == 1


@pytest.mark.parametrize("settings", [(-1, 0), (0, -1), (0, 0, 0)])
def test_nonsense_is_refused(settings: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rounds must be at least 0 and every at least 1"):
        Steps(*settings)


# --- the pipeline as a whole, batches, spoken examples -----------------------------------------------------------


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


def test_a_sample_from_beginning_to_end(corpus: LibriSpeech) -> None:
    for index, seconds in enumerate(LENGTHS):
        sample = build(speeds=(1.0,)).run(corpus[index], 7)
        assert sample["features"].shape == (-(-(int(seconds * 100) + 1) // 3), 240)
        assert sample["features"].dtype == np.float32
        assert sample["tokens"].tolist() == [2] * (index + 1)
    slow = build(speeds=(0.5,)).run(corpus[1], 7)
    assert len(slow["features"]) == -(-221 // 3)


def test_shorter_samples_of_a_batch_are_filled_up_with_zeros() -> None:
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


def test_what_cannot_be_spoken() -> None:
    with pytest.raises(ValueError, match="has no voice 'klingon-opera'"):
        example_voices.speak("yes", voice="klingon-opera")
    with pytest.raises(ValueError, match="nothing to say in ''"):
        example_voices.speak("")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_is_cut_off_says_so_from_a_worker_too(tmp_path: Path, workers: int) -> None:
    example_voices.write_chapter(tmp_path, 1, 2, [("a", np.random.default_rng(0).random(9000, np.float32), 16_000)])
    data: Any = LibriSpeech(tmp_path)
    path = Path(data[0]["path"])
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match="libsndfile cannot read the file: ") as caught:
        list(DataLoader(data, pipeline=build(), collate_fn=pad_batch, num_workers=workers))
    assert "1-2-0000.flac" in "".join((str(caught.value), *getattr(caught.value, "__notes__", ())))
