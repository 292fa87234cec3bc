"""LibriSpeech as a data set: FLAC files with the transcripts of a chapter beside them.

Panayotov, Chen, Povey and Khudanpur, "LibriSpeech: an ASR corpus based on public domain audio books", ICASSP 2015.
Utterance NNNN of a chapter is the file SPEAKER/CHAPTER/SPEAKER-CHAPTER-NNNN.flac; SPEAKER-CHAPTER.trans.txt in the same
folder has a line for each: its name, a space, its words.

Decision: tokens lie in one array and names in numbers, not in a Python list for each of 280,000 utterances. Workers
inherit the data set by fork, and counting references to so many objects would copy their pages into every worker.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minato_gpu import Source

from .files import find, say_left_out

ALPHABET = " abcdefghijklmnopqrstuvwxyz'"
_NAME = re.compile(r"(.+)-(\d{4})\.flac")
_LARGEST = 255  # a token is kept in one byte
_LAYOUT = "SPEAKER/CHAPTER/SPEAKER-CHAPTER-NNNN.flac with SPEAKER-CHAPTER.trans.txt beside it"


class LibriSpeech:
    """The utterances under a folder as a map-style data set, sorted by folder and number.

    Items are ``{"path": str, "tokens": int64 (n,), "index": int}``. A token is 1 + the place of a character of the
    transcript, in lower case, in ``alphabet``; 0 is left to the blank. ``index`` is the item's place in the data set.

    Links are followed. ``left_out`` counts other files than FLAC and text, by ending, and what is hidden (names that
    begin with a dot); it is logged once.

    Raises FileNotFoundError for a folder that is missing or holds no FLAC file, for a file that its chapter lacks, and
    for a link to what is missing; ValueError for a FLAC file that is not called as the layout says, a transcript that
    is not what it should be, an alphabet that cannot be used, and a link to a folder that it lies in.
    """

    def __init__(self, root: str | Path, alphabet: str = ALPHABET) -> None:
        self.root = Path(root)
        self.alphabet = alphabet
        if not self.root.is_dir():
            raise FileNotFoundError(f"there is no folder {str(root)!r}")
        numbers = _numbers(alphabet)
        self._chapters: list[str] = []
        chapter_of: list[NDArray[np.int32]] = []
        utterances: list[NDArray[np.int16]] = []
        tokens: list[NDArray[np.uint8]] = []
        flac, self.left_out = find(self.root, (".flac", ".txt"))
        for folder, files in _chapters(flac):
            chapter = folder / f"{folder.parent.name}-{folder.name}"
            texts = _texts(chapter, files)
            chapter_of.append(np.full(len(texts), len(self._chapters), np.int32))
            utterances.append(np.array(list(texts), np.int16))
            tokens += [_tokens(text, where, numbers) for where, text in texts.values()]
            self._chapters.append(str(chapter))
        if not tokens:
            raise FileNotFoundError(f"{str(root)!r} holds no FLAC files; the layout is {_LAYOUT}")
        say_left_out(self.root, self.left_out, f"the layout is {_LAYOUT}")
        self._chapter_of = np.concatenate(chapter_of)
        self._utterance = np.concatenate(utterances)
        self._tokens = np.concatenate(tokens)
        self._ends = np.cumsum([len(text) for text in tokens])

    def __len__(self) -> int:
        return len(self._utterance)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        begin = int(self._ends[index - 1]) if index else 0
        return {
            "path": self._path(index),
            "tokens": self._tokens[begin : self._ends[index]].astype(np.int64),
            "index": index,
        }

    def source(self, index: int) -> Source:
        """Returns the source of the recording, to be read ahead."""
        return Source(self._path(range(len(self))[index]))

    def _path(self, index: int) -> str:
        return f"{self._chapters[self._chapter_of[index]]}-{self._utterance[index]:04}.flac"


def _chapters(paths: list[str]) -> list[tuple[Path, list[str]]]:
    """Each folder that holds FLAC files or a transcript, with the names of the former; sorted, so that an index means
    the same anywhere."""
    found = defaultdict[str, list[str]](list)
    for path in paths:
        folder, name = os.path.split(path)
        if name.lower().endswith(".flac"):
            found[folder].append(name)
        elif name.endswith(".trans.txt"):
            found[folder] += []
    return sorted((Path(folder), names) for folder, names in found.items())


def _texts(chapter: Path, files: list[str]) -> dict[int, tuple[str, str]]:
    """By utterance, in order: the line of the transcript that it is in, in words, and its text. ``chapter``: what all
    its files are called, before their numbers."""
    transcript = chapter.with_name(f"{chapter.name}.trans.txt")
    if not transcript.is_file():
        raise FileNotFoundError(
            f"{str(chapter.parent)!r} has FLAC files but no transcript {transcript.name!r}; the layout is {_LAYOUT}"
        )
    known, present = _lines(transcript, chapter.name), {_number(chapter, file): file for file in files}
    for number, file in present.items():
        if number not in known:
            raise ValueError(f"{str(chapter.with_name(file))!r} has no line in {transcript.name!r}")
    for number, (where, _) in known.items():
        if number not in present:
            raise FileNotFoundError(f"{where}: there is no '{chapter.name}-{number:04}.flac' beside it")
    return {number: known[number] for number in sorted(present)}


def _number(chapter: Path, file: str) -> int:
    match = _NAME.fullmatch(file)
    if match is None or match[1] != chapter.name:
        raise ValueError(
            f"{str(chapter.with_name(file))!r} is not called {chapter.name}-NNNN.flac after its folders; "
            f"the layout is {_LAYOUT}"
        )
    return int(match[2])


def _lines(transcript: Path, chapter: str) -> dict[int, tuple[str, str]]:
    found: dict[int, tuple[str, str]] = {}
    for line, content in enumerate(transcript.read_text(encoding="utf-8").splitlines(), start=1):
        name, _, text = content.strip().partition(" ")
        where = f"{str(transcript)!r}, line {line}"
        match = _NAME.fullmatch(f"{name}.flac")
        if match is None or match[1] != chapter or not text:
            raise ValueError(f"{where}: {content!r} is not '{chapter}-NNNN', a space, and the words")
        if int(match[2]) in found:
            raise ValueError(f"{where}: {name} has a line already")
        found[int(match[2])] = (where, text.lower())
    return found


def _numbers(alphabet: str) -> dict[str, int]:
    """Returns the token of each character, from 1 on. Raises ValueError for an alphabet that cannot be used."""
    if not alphabet or len(set(alphabet)) != len(alphabet) or alphabet != alphabet.lower():
        raise ValueError(f"an alphabet consists of different characters, in lower case, got {alphabet!r}")
    if len(alphabet) > _LARGEST:
        raise ValueError(f"an alphabet has at most {_LARGEST} characters, this one has {len(alphabet)}")
    return {character: token for token, character in enumerate(alphabet, start=1)}


def _tokens(text: str, where: str, numbers: dict[str, int]) -> NDArray[np.uint8]:
    try:
        return np.frombuffer(bytes(map(numbers.__getitem__, text)), np.uint8)
    except KeyError as error:
        raise ValueError(
            f"{where}: the character {error.args[0]!r} is not in the alphabet "
            f"{''.join(numbers)!r}; give LibriSpeech an alphabet that has it, or change the line"
        ) from None
