"""Finds the files of a data set in a folder, and says what is left out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from minato_gpu.util.messages import say_once

HIDDEN = "hidden files and folders"
# what systems leave in folders: macOS in archives, storage of Synology's and QNAP's, Windows, ext4
_LEFT = frozenset(
    (
        "__MACOSX",
        "Thumbs.db",
        "desktop.ini",
        "@eaDir",
        "#recycle",
        "@Recycle",
        "$RECYCLE.BIN",
        "System Volume Information",
        "lost+found",
    )
)


def is_hidden(name: str) -> bool:
    """Returns whether a file or folder of this name holds no samples: ".ipynb_checkpoints", "._1.jpg", "__MACOSX"."""
    return name.startswith(".") or name in _LEFT


def find(folder: str | os.PathLike[str], endings: tuple[str, ...]) -> tuple[list[str], Counter[str]]:
    """Returns the files in a folder and all folders below whose names end in one of ``endings`` (in small letters or
    capitals), sorted; and how many others there are, by ending. Links are followed; hidden folders are not looked into.

    Raises FileNotFoundError, naming it, for a link to what is missing, OSError for a folder that cannot be read, and
    ValueError for a link to a folder that it lies in.
    """
    found, others, folders = [], Counter[str](), [os.fspath(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if is_hidden(entry.name):
                    others[HIDDEN] += 1
                    continue
                if entry.is_symlink():
                    check_link(entry.path)
                if entry.is_dir():
                    folders.append(entry.path)
                elif entry.name.lower().endswith(endings):
                    found.append(entry.path)
                else:
                    others[_kind(entry.name)] += 1
    return sorted(found), others


def _kind(name: str) -> str:
    ending = Path(name).suffix.lower()
    return f"{ending} files" if ending else "files without an ending"


def check_link(path: str) -> None:
    """Raises FileNotFoundError, naming the link, if its target is missing, and ValueError if it lies in its target."""
    target = Path(os.path.realpath(path))
    if not target.exists():
        raise FileNotFoundError(
            f"{path!r} is a link to {str(target)!r}, which is missing: bring that back, or remove the link"
        )
    if Path(path).parent.resolve().is_relative_to(target):
        raise ValueError(f"{path!r} is a link to a folder that it lies in: remove it")


def say_left_out(source: str | os.PathLike[str], left_out: Mapping[str, int], why: str) -> None:
    """Logs once how much of each kind is left out of ``source``, and ``why``; nothing where all counts are 0."""
    counts = ", ".join(f"{count:,} {what}" for what, count in left_out.items() if count)
    if counts:
        say_once(f"{os.fspath(source)!r}: left out {counts}; {why}")
