"""A source: where the bytes of a sample are stored, as a data set declares it.

A data set with a method ``source(key)`` lets the loader read ahead: it returns a ``Source`` for a key, or several. It
is called in the training process, for keys that the sampler has drawn: it must be cheap and read nothing. A worker's
``read_bytes`` (reading.py) then finds the bytes at hand. Of a data set that declares no source nothing is read ahead.

Beside bytes that are read, memory holds what was made of them, under keys of the same form: kept fields of a sample,
and whole prepared samples.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from minato_gpu.util.messages import say_once

Key = tuple[str, int, int | None] | tuple[str, int, int | None, str]
"""Path, offset and length (None: to the end), and the version where one is declared: what the bytes are."""


FIELDS = "fields:"  # in the place of a path: what was made of a sample (pipeline/kept_fields.py), not what was read


def fields_key(sample: int) -> Key:
    """Returns the key of the fields kept of the sample that has this index in the data set."""
    return FIELDS, sample, None


PREPARED = "prepared:"  # a whole sample, that a loader has prepared for others (prepared_samples.py)


def prepared_key(number: int) -> Key:
    """Returns the key of a prepared sample. Its ``number`` is a hash of seed, key and occurrence: the same for all
    loaders that would prepare the same."""
    return PREPARED, number, None


@dataclass(frozen=True, slots=True)
class Source:
    """``length`` bytes of ``path`` from ``offset`` on.

    Args:
        path: a file, or a URL of anything that fsspec opens, such as ``"s3://bucket/photographs/1.jpg"``. A path object
            becomes a string. One that is not absolute is, as for ``open``, of the working directory at the time: a
            worker that has changed it reads its own file itself.
        offset: the first byte.
        length: how many bytes; None: to the end.
        name: what is there, for people; it is no part of what the bytes are, and two sources that differ in it only are
            equal.
        version: of a URL, what tells apart the contents that were there at different times, such as an ETag: a copy
            that was kept of another version is not used. It is believed, and not asked of the storage.

    Raises:
        TypeError: the path is neither a string nor a path object of one.
        ValueError: an offset or a length below zero.
    """

    path: str
    offset: int = 0
    length: int | None = None
    name: str = field(default="", compare=False)
    version: str = ""

    def __post_init__(self) -> None:
        given: object = self.path
        if not isinstance(given, str):
            path = given.__fspath__() if isinstance(given, os.PathLike) else given
            if not isinstance(path, str):
                raise TypeError(f"a source's path must be a string or a path object, got {given!r}")
            object.__setattr__(self, "path", path)
        if self.offset < 0 or (self.length is not None and self.length < 0):
            raise ValueError(f"a source's offset and length must be >= 0, got {self.offset} and {self.length}")

    @property
    def key(self) -> Key:
        """Returns what identifies its bytes; NumPy's strings and numbers as Python's, which are the same in every run.

        A file's path is absolute, in whatever directory the program was started, or is by now.
        """
        path = str(self.path)
        if path[:1] != "/" and not self.is_remote:
            path = os.path.join(os.getcwd(), self.file.removeprefix("./"))  # noqa: PTH109, PTH118  # Path takes 10 µs
        place = path, int(self.offset), None if self.length is None else int(self.length)
        if self.version:
            return (*place, str(self.version))
        return place

    @staticmethod
    def of(key: Key) -> Source:
        """Returns the source that has this key, without a name."""
        return Source(*key[:3], version=key[3] if len(key) > 3 else "")

    @property
    def is_remote(self) -> bool:
        """True if it is read through fsspec, not as a file of this machine."""
        return "://" in self.path and not self.path.startswith("file://")

    @property
    def file(self) -> str:
        """The path of the file, without "file://"; of a remote source the URL as it is, which names no file."""
        return self.path.removeprefix("file://")

    def __str__(self) -> str:
        if self.name:
            return f"{self.path}: {self.name}"
        if self.offset == 0 and self.length is None:
            return self.path
        end = "" if self.length is None else str(self.offset + self.length)
        return f"{self.path}[{self.offset}:{end}]"


SourceOf = Callable[[Any], Any]
"""A function from a key to a ``Source``, or several."""


def source_of(dataset: Any) -> SourceOf | None:
    """Returns the ``source`` of a data set; None if it has none.

    Of a ``Subset`` or a ``ConcatDataset`` it is that of the data sets within, if all of these have one. If to look the
    attribute up raises, that is logged once, and counts as none.
    """
    try:
        declared = getattr(dataset, "source", None)
    except Exception as error:  # a property's, of a data set that knows nothing of this
        say_once(
            f"The attribute 'source' of the data set ({type(dataset).__name__}) raised {error!r}: nothing is read ahead"
        )
        return None
    if callable(declared):
        return declared  # type: ignore[no-any-return]
    if type(dataset) is Subset:
        within, indices = source_of(dataset.dataset), dataset.indices
        return None if within is None else lambda key: within(indices[key])
    if type(dataset) is ConcatDataset:
        return _of_several(dataset)
    return None


def _of_several(dataset: ConcatDataset[Any]) -> SourceOf | None:
    parts = [source_of(each) for each in dataset.datasets]
    ends = dataset.cumulative_sizes

    def found(key: int) -> Any:
        key = key if key >= 0 else key + ends[-1]
        part = bisect_right(ends, key)
        declared = parts[part]
        assert declared is not None
        return declared(key - (ends[part - 1] if part else 0))

    return None if None in parts else found
