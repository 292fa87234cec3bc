"""What readers find in folders: links are followed, one that leads nowhere is an error, what is left out is said."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import example_photographs, example_voices
from pipelines.coco import CocoDetection
from pipelines.example_detections import write as write_detections
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


def test_what_is_left_out_is_counted_and_said_once(
    reader: tuple[Path, Any, Path, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    root, kind, _, others = reader
    count = len(kind(root))
    assert not caplog.records
    for name in others:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"")
    for _ in range(2):
        data = kind(root)
        assert len(data) == count and sum(data.left_out.values()) >= sum(bool(said) for said in others.values())
    (record,) = caplog.records
    text = record.getMessage().replace("2 .gif", "1 .gif")
    assert repr(str(root)) in text and all(said in text for said in others.values())


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


def test_a_missing_class_does_not_renumber_the_others(tmp_path: Path) -> None:
    photographs(tmp_path)
    (tmp_path / "airport").symlink_to(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="airport' is a link to"):
        ImageFolder(tmp_path)


def test_a_link_that_leads_round_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "round").symlink_to(tmp_path / "a")
    with pytest.raises(ValueError, match="round' is a link to a folder that it lies in"):
        find(tmp_path, (".jpg",))


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        find(tmp_path / "absent", (".jpg",))


def test_images_without_objects_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_detections(tmp_path)
    for _ in range(2):
        data = CocoDetection.in_folder(tmp_path)
    (record,) = caplog.records
    left_out = data.left_out["images without objects"]
    assert left_out and f"{left_out} images without objects; keep_empty=True keeps" in record.getMessage()
