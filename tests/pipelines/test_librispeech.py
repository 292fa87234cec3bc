"""LibriSpeech's layout: what an item holds, and what is said about a folder that is not as it should be."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import speech_recognition
from pipelines.librispeech import LibriSpeech


def chapter(root: Path, speaker: int, number: int, texts: dict[int, str]) -> Path:
    """A folder with empty FLAC files and their transcript; returns the transcript."""
    folder = root / str(speaker) / str(number)
    folder.mkdir(parents=True)
    names = {utterance: f"{speaker}-{number}-{utterance:04}" for utterance in texts}
    for name in names.values():
        (folder / f"{name}.flac").touch()
    transcript = folder / f"{speaker}-{number}.trans.txt"
    transcript.write_text("".join(f"{names[utterance]} {text}\n" for utterance, text in texts.items()))
    return transcript


def test_utterances_come_by_folder_and_number_with_their_characters(tmp_path: Path) -> None:
    part = tmp_path / "LibriSpeech" / "dev-clean"
    chapter(part, 84, 121123, {1: "A B'Z", 0: "GO"})
    chapter(part, 174, 50561, {12: "Z"})
    data = speech_recognition.dataset(tmp_path)
    assert len(data) == 3
    items = [data[n] for n in range(3)]
    paths = [Path(item["path"]).relative_to(part) for item in items]
    assert [str(path) for path in paths] == [
        "174/50561/174-50561-0012.flac",
        "84/121123/84-121123-0000.flac",
        "84/121123/84-121123-0001.flac",
    ]
    assert all(Path(item["path"]).is_file() for item in items)
    assert [item["tokens"].tolist() for item in items] == [[27], [8, 16], [2, 1, 3, 28, 27]]
    assert all(item["tokens"].dtype == np.int64 for item in items)
    assert [item["index"] for item in items] == [0, 1, 2]


def test_an_index_counts_from_the_end_too_and_must_exist(tmp_path: Path) -> None:
    chapter(tmp_path, 1, 2, {0: "a", 1: "b"})
    data = LibriSpeech(tmp_path)
    assert data[-1]["path"] == data[1]["path"] and data[-1]["index"] == 1
    for index in (2, -3):
        with pytest.raises(IndexError):
            data[index]


def test_an_alphabet_of_ones_own(tmp_path: Path) -> None:
    chapter(tmp_path, 1, 2, {0: "ÄB2"})
    assert LibriSpeech(tmp_path, alphabet="b2ä")[0]["tokens"].tolist() == [3, 1, 2]
    for alphabet in ("", "aa", "aB", "".join(map(chr, range(0x4E00, 0x4F00)))):
        with pytest.raises(ValueError, match="an alphabet"):
            LibriSpeech(tmp_path, alphabet=alphabet)


def test_it_is_kept_compactly(tmp_path: Path) -> None:
    chapter(tmp_path, 1, 2, dict.fromkeys(range(300), "x" * 180))
    data = LibriSpeech(tmp_path)
    assert len(pickle.dumps(data)) < 300 * (180 + 20)
    assert not any(isinstance(value, list) and len(value) > 1 for value in vars(data).values())


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("1-2-0000 GO\n", ValueError, r"1-2-0001\.flac' has no line in '1-2\.trans\.txt'"),
        ("1-2-0000 GO\n1-2-0001 ON\n1-2-0007 X\n", FileNotFoundError, r"line 3: there is no '1-2-0007\.flac' beside"),
        ("1-2-0000 GO\n1-2-0000 ON\n", ValueError, "line 2: 1-2-0000 has a line already"),
        ("1-2-0000 GO\n1-2-0001\n", ValueError, "line 2: '1-2-0001' is not '1-2-NNNN', a space, and the words"),
        ("1-2-0000 GO\n3-2-0001 ON\n", ValueError, "line 2: '3-2-0001 ON' is not"),
        ("1-2-0000 GO\n\n1-2-0001 ON\n", ValueError, "line 2: '' is not"),
        (
            "1-2-0000 GO\n1-2-0001 NO. 9\n",
            ValueError,
            r"trans\.txt', line 2: the character '\.' is not in the alphabet .*; give LibriSpeech an alphabet",
        ),
    ],
)
def test_what_is_wrong_with_a_transcript_is_said(tmp_path: Path, text: str, error: Any, message: str) -> None:
    chapter(tmp_path, 1, 2, {0: "GO", 1: "ON"}).write_text(text)
    with pytest.raises(error, match=message):
        LibriSpeech(tmp_path)


def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        LibriSpeech(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="holds no FLAC files; the layout is SPEAKER/CHAPTER/"):
        LibriSpeech(tmp_path)
    chapter(tmp_path, 3, 4, {0: "GO"})
    transcript = chapter(tmp_path, 1, 2, {0: "GO"})
    transcript.with_name("1-2-0000.flac").unlink()
    with pytest.raises(FileNotFoundError, match=r"line 1: there is no '1-2-0000\.flac' beside"):
        LibriSpeech(tmp_path)
    other = transcript.with_name("0000.flac")
    other.touch()
    with pytest.raises(ValueError, match=r"0000\.flac' is not called 1-2-NNNN\.flac after its folders"):
        LibriSpeech(tmp_path)
    other.unlink()
    transcript.unlink()
    transcript.with_name("1-2-0000.flac").touch()
    with pytest.raises(FileNotFoundError, match=r"has FLAC files but no transcript '1-2\.trans\.txt'"):
        LibriSpeech(tmp_path)
