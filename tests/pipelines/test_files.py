"""What readers find in folders: links are followed, one that leads nowhere is an error, what is left out is said."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import example_photographs, example_voices
from pipelines.files import find
from pipelines.image_classification import ImageFolder
from pipelines.librispeech import LibriSpeech
from pipelines.volumes import CaseFolder


def photographs(root: Path) -> None:
    example_photographs.write(root)


def volumes(root: Path) -> None:
    for part in "xy":
        np.save(root / f"a_{part}.npy", np.zeros((2, 2, 2), np.float32))


def voices(root: Path) -> None:
    noise = np.random.default_rng(0).random(900, np.float32)
    example_voices.write_chapter(root, 1, 2, [("a", noise, 16_000), ("b", noise, 16_000)])


# How to make a data set, how to open it, a file of it, and others that it leaves out, with what it says of them.
_READERS: dict[str, tuple[Callable[[Path], None], Any, str, dict[str, str]]] = {
    "photographs": (
        photographs,
        ImageFolder,
        "chelsea/lossy.webp",
        {
            "chelsea/a.gif": "1 .gif files",
            "chelsea/deep/b.GIF": "",
            "moon/c": "1 files without an ending",
            "d.webp": "1 photographs in no class folder",
            "notes.txt": "",
        },
    ),
    "volumes": (volumes, CaseFolder, "a_x.npy", {"other.nii.gz": "1 .nii.gz files", "kits.json": ""}),
    "voices": (voices, LibriSpeech, "1/2/1-2-0001.flac", {"1/2/1-2-0002.wav": "1 .wav files", "SPEAKERS.TXT": ""}),
}


@pytest.fixture(params=_READERS)
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any, Path, dict[str, str]]:
    """The folder of a data set, who opens it, a file of it, and what is to be added that is left out."""
    make, kind, one, others = _READERS[request.param]
    root = tmp_path / "data"
    root.mkdir()
    make(root)
    return root, kind, root / one, others


@pytest.mark.parametrize(
    "name", [".ipynb_checkpoints", "__MACOSX", "@eaDir", "{folder}/.ipynb_checkpoints", "{folder}/._{file}"]
)
def test_what_is_hidden_holds_no_samples(
    reader: tuple[Path, Any, Path, dict[str, str]], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Folders with copies, metadata of macOS, and links that lead nowhere, as editors leave them."""
    root, kind, one, _ = reader
    before = kind(root)
    place = Path(root, name.format(folder=one.relative_to(root).parent, file=one.name))
    if one.name in place.name:
        place.write_bytes(b"\0\5\x16\7")
    else:
        shutil.copytree(root if one.parent == root else root / one.relative_to(root).parts[0], root.parent / "copy")
        (root.parent / "copy").rename(place)
    one.with_name(f".#{one.name}").symlink_to("gone")
    after = kind(root)
    assert [after[n] for n in range(len(after))] == [before[n] for n in range(len(before))]
    assert getattr(after, "classes", None) == getattr(before, "classes", None)
    assert after.left_out["hidden files and folders"] == 2 and "2 hidden files and folders" in caplog.text


def test_a_link_to_what_is_missing_is_an_error_that_names_it(reader: tuple[Path, Any, Path, dict[str, str]]) -> None:
    root, kind, one, _ = reader
    one.unlink()
    one.symlink_to(root.parent / "gone")
    with pytest.raises(FileNotFoundError, match=f"{one.name}' is a link to '.*gone', which is missing: bring that"):
        kind(root)


def test_links_are_followed(reader: tuple[Path, Any, Path, dict[str, str]]) -> None:
    """To files and to folders."""
    root, kind, one, _ = reader
    before = kind(root)
    for place in (one, *(folder for folder in one.parents if root in folder.parents)):
        moved = root.parent / f"elsewhere of {place.name}"
        shutil.move(place, moved)
        place.symlink_to(moved)
        after = kind(root)
        assert [after[n]["path"] for n in range(len(after))] == [before[n]["path"] for n in range(len(before))]


def test_a_link_that_leads_round_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "round").symlink_to(tmp_path / "a")
    with pytest.raises(ValueError, match="round' is a link to a folder that it lies in"):
        find(tmp_path, (".jpg",))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (ImageFolder, "no class folders"),
        (CaseFolder, r"holds no volumes such as case_00000/imaging\.nii\.gz"),
        (LibriSpeech, "holds no FLAC files; the layout is SPEAKER/CHAPTER/"),
    ],
)
def test_folders_that_are_absent_or_empty(tmp_path: Path, kind: Any, wanted: str) -> None:
    with pytest.raises(OSError, match="absent"):
        find(tmp_path / "absent", (".jpg",))
    with pytest.raises(FileNotFoundError, match="no folder"):
        kind(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=wanted):
        kind(tmp_path)


# --- LibriSpeech's layout --------------------------------------------------------------------------------------


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


def test_an_alphabet_of_ones_own(tmp_path: Path) -> None:
    chapter(tmp_path, 1, 2, {0: "ÄB2"})
    assert LibriSpeech(tmp_path, alphabet="b2ä")[0]["tokens"].tolist() == [3, 1, 2]
    for alphabet in ("", "aa", "aB", "".join(map(chr, range(0x4E00, 0x4F00)))):
        with pytest.raises(ValueError, match="an alphabet"):
            LibriSpeech(tmp_path, alphabet=alphabet)


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
    chapter(tmp_path, 3, 4, {0: "GO"})
    transcript = chapter(tmp_path, 1, 2, {0: "GO"})
    other = transcript.with_name("1-2-0000.flac").rename(transcript.with_name("0000.flac"))
    with pytest.raises(ValueError, match=r"0000\.flac' is not called 1-2-NNNN\.flac after its folders"):
        LibriSpeech(tmp_path)
    other.unlink()
    transcript.unlink()
    transcript.with_name("1-2-0000.flac").touch()
    with pytest.raises(FileNotFoundError, match=r"has FLAC files but no transcript '1-2\.trans\.txt'"):
        LibriSpeech(tmp_path)
