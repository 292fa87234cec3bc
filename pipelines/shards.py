"""Photographs in tar shards, as WebDataset writes them, as a map-style data set: any sampler may pick any sample.

WebDataset's convention (github.com/webdataset/webdataset, "The WebDataset Format"): the members of a sample follow each
other, their names are the same up to the first dot of the file name (the sample's *key*), and what comes after that
dot says what they are: ``0001.jpg``, ``0001.cls``. Shards are plain tar files, not compressed.

Only the headers are read when the data set is opened; that takes some tens of microseconds for each member. A sample is
then one read at a known offset.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from minato_gpu import Source

from .files import is_hidden

SUFFIXES = ("jpg", "jpeg", "png", "webp")
LABEL = "cls"
_LARGEST_LABEL = 2**63 - 1
_PIECE = 1 << 20  # bytes read at a time

_Found = tuple[int, int, int, int, str]  # shard, offset, bytes, label, member


class TarShards:
    """Photographs with class labels in tar shards.

    ``shards``: a path, a pattern such as ``"data/train-*.tar"``, or a sequence of them; taken in sorted order.
    Items are ``{"path": Source, "label": int}``. Each sample needs a photograph (``.jpg``, ``.jpeg``, ``.png`` or
    ``.webp``) and its label as a decimal number in ``.cls``; its other members are left out, and so are hidden
    members, and hidden shards that a pattern finds (those whose names begin with a dot, say).

    Raises FileNotFoundError where nothing matches, and ValueError, naming shard and member, for a file that is no
    uncompressed tar archive, is several in a row, is damaged or cut off; and for a sample that has two members of one
    kind, lacks its photograph or label or has a link or a sparse file for it, or whose label is no int64.
    """

    def __init__(self, shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> None:
        self.shards = _matching([shards] if isinstance(shards, (str, os.PathLike)) else shards)
        found = [sample for number, shard in enumerate(self.shards) for sample in _samples(number, shard)]
        if not found:
            raise ValueError(f"the shards {self.shards[0]!r} ... hold no sample")
        numbers, offsets, lengths, labels, self._names = zip(*found, strict=True)
        self._shard = np.array(numbers, np.int32)
        self._offset = np.array(offsets, np.int64)
        self._length = np.array(lengths, np.int64)
        self.labels = np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"path": self.source(index), "label": int(self.labels[index])}

    def source(self, index: int) -> Source:
        """Returns the source of the photograph, to be read ahead."""
        shard = self.shards[self._shard[index]]
        return Source(shard, int(self._offset[index]), int(self._length[index]), self._names[index])


def _matching(patterns: Sequence[str | os.PathLike[str]]) -> list[str]:
    found: list[str] = []
    for pattern in map(Path, patterns):
        found_here = pattern.parent.glob(pattern.name)
        matches = [pattern] if pattern.is_file() else [path for path in found_here if not is_hidden(path.name)]
        if not matches:
            raise FileNotFoundError(f"no shard matches {str(pattern)!r}")
        found += map(str, matches)
    return sorted(found)


def _samples(number: int, shard: str) -> Iterator[_Found]:
    """The samples of one shard, in its order."""
    try:
        with tarfile.open(shard, "r:") as archive:
            for _, members in groupby(_files(shard, archive), key=lambda member: _key_and_kind(member)[0]):
                yield _sample(number, shard, archive, _by_kind(shard, members))
    except tarfile.TarError as error:
        raise ValueError(f"{shard!r} is no uncompressed tar archive, or is damaged: {error}") from error


def _key_and_kind(member: tarfile.TarInfo) -> tuple[str, str]:
    folder, slash, name = member.name.rpartition("/")
    stem, _, kind = name.partition(".")
    return folder + slash + stem, kind.lower()


def _files(shard: str, archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """All members but folders and what is hidden, as tar on macOS writes "._1.jpg" before "1.jpg".

    Where tarfile finds no more there must be zeros, and nothing else in the file: a header that is damaged or cut off
    ends the archive for it, too, unless it is the first. All that write archives write zeros at the end, as POSIX has
    it; where one archive follows another, tarfile and GNU tar see the first alone.
    """
    yield from (member for member in archive if not member.isdir() and not _hidden(member.name))
    file, at = archive.fileobj, archive.offset
    assert file is not None
    file.seek(at)
    block = file.read(tarfile.BLOCKSIZE)
    if not block:
        raise ValueError(
            f"{shard!r} ends at byte {at} without the zeros that end a tar archive: it was cut off, and must be copied "
            "or written again; or its writer was not closed: if nothing is missing, end it by truncate --size=+1024"
        )
    if block != bytes(tarfile.BLOCKSIZE):
        raise ValueError(
            f"{shard!r} is damaged or cut off at byte {at}, where a member or the end of the archive should begin; "
            "copy or write it again"
        )
    while piece := file.read(_PIECE):
        at = file.tell() - len(piece.lstrip(b"\0"))
        if at < file.tell():
            raise ValueError(
                f"{shard!r} has more at byte {at}, behind the zeros that end a tar archive: archives that follow each "
                "other must be shards of their own, or be joined by tar --concatenate; if it is one archive it is "
                "damaged, and must be copied or written again"
            )


def _hidden(name: str) -> bool:
    return any(is_hidden(part) for part in name.split("/") if part not in (".", ".."))


def _by_kind(shard: str, members: Iterable[tarfile.TarInfo]) -> dict[str, tarfile.TarInfo]:
    """Returns the members of a sample by kind. Raises ValueError for two of one kind."""
    found: dict[str, tarfile.TarInfo] = {}
    for member in members:
        before = found.setdefault(_key_and_kind(member)[1], member)
        if before is not member:
            raise ValueError(
                f"{member.name!r} of {shard!r} follows {before.name!r}, of the same kind, in one sample; "
                "each sample needs a name of its own up to the first dot"
            )
    return found


def _sample(number: int, shard: str, archive: tarfile.TarFile, parts: dict[str, tarfile.TarInfo]) -> _Found:
    photograph = next((parts[kind] for kind in SUFFIXES if kind in parts), None)
    label = parts.get(LABEL)
    if photograph is None or label is None:
        missing = f".{LABEL}" if label is None else " or ".join(f".{kind}" for kind in SUFFIXES)
        names = ", ".join(member.name for member in parts.values())
        raise ValueError(f"a sample of {shard!r} has no member {missing}; it has {names}")
    for member in (photograph, label):
        if not member.isfile():
            raise ValueError(
                f"{member.name!r} of {shard!r} is no file but a link to {member.linkname!r}; "
                "write shards with the files themselves (tar --dereference --hard-dereference)"
            )
        if member.issparse():
            raise ValueError(
                f"{member.name!r} of {shard!r} is a sparse file, which does not lie in one piece; "
                "write shards with all bytes of their files (tar without --sparse)"
            )
    file = archive.extractfile(label)
    assert file is not None
    text = file.read()
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{label.name!r} of {shard!r} is no class number: {text[:40]!r}") from None
    if abs(value) > _LARGEST_LABEL:
        raise ValueError(f"{label.name!r} of {shard!r} is no class number that an int64 holds: {text[:40]!r}")
    return number, photograph.offset_data, photograph.size, value, photograph.name
