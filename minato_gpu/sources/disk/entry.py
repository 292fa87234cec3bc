"""A copy's file: a header and the bytes. The key's digits are its path: two for a folder, the rest for the file. Its
time (mtime) says when it was used last."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_digest

KEY_BYTES = 16
_HEADER = struct.Struct("<8sQQ16s16s")  # magic and format, length, checksum, a digest of the version, the key
_MAGIC = b"minato\n\x02"
HEAD = _HEADER.size
_BLOCK = 4096


class CacheEntry(NamedTuple):
    """A copy in a directory: its file, sizes and last use."""

    name: str  # path of its file in the directory, see ``path_of``
    length: int  # bytes that it holds
    nbytes: int  # bytes that it takes on disk
    used_at: float  # when it was used last, in seconds since 1970

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.name.replace("/", ""))


def path_of(key: bytes) -> str:
    """Returns the path of a key's file in the directory, such as "3f/a0...": the first two digits name a folder, the
    other 30 the file. Raises ValueError for a key that has not 16 bytes."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(key)}; give a digest")
    digits = key.hex()
    return f"{digits[:2]}/{digits[2:]}"


def header(key: bytes, version: bytes, data: memoryview) -> bytes:
    """Returns what stands before ``data`` in its file."""
    digest = xxh3_128_digest(version)
    return _HEADER.pack(_MAGIC, len(data), _checksum(data, digest, key), digest, key)


def fault(head: bytes | bytearray, data: memoryview, key: bytes, version: bytes) -> str:
    """Returns "corrupt" for bytes that are not what was written, "stale" for those of another version, else "".

    ``head``: exactly the file's first ``HEAD`` bytes.
    """
    magic, length, checksum, digest, own = _HEADER.unpack(head)
    if (magic, length, own) != (_MAGIC, len(data), key) or checksum != _checksum(data, digest, key):
        return "corrupt"
    return "" if digest == xxh3_128_digest(version) else "stale"


def is_of(head: bytes, length: int, key: bytes, version: bytes) -> bool:
    """Returns whether a header is that of so many bytes of this version; their checksum is not compared."""
    if len(head) < HEAD:
        return False
    magic, found, _, digest, own = _HEADER.unpack(head)
    return bool((magic, found, digest, own) == (_MAGIC, length, xxh3_128_digest(version), key))


def disk_space_of(length: int) -> int:
    """Returns the bytes of disk that a copy of ``length`` bytes takes: whole blocks."""
    return -(-(HEAD + length) // _BLOCK) * _BLOCK


def scan(root: Path) -> Iterator[CacheEntry]:
    """Yields every copy in the directory; one that comes or goes meanwhile may be among them."""
    for folder in [*_listed(root)]:
        if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
            for file in sorted(_listed(folder), key=os.DirEntry.inode):  # as they are stored on disk
                if len(file.name) != 2 * KEY_BYTES - 2:
                    continue
                try:
                    found = file.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                name = f"{folder.name}/{file.name}"
                yield CacheEntry(name, found.st_size - HEAD, found.st_blocks * 512, found.st_mtime)


def _listed(folder: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            yield from found
    except FileNotFoundError:
        return


def _checksum(data: memoryview, digest: bytes, key: bytes) -> int:
    return xxh3_64_intdigest(data, xxh3_64_intdigest(digest + key))
