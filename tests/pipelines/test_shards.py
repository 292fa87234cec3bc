"""Tar shards: what WebDataset writes, read sample by sample, gives what the same files in folders give."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minato_gpu import DataLoader, read_bytes
from pipelines import image_classification
from pipelines.example_photographs import write
from pipelines.shards import TarShards


def shard(path: Path, members: Mapping[str, bytes], mode: Any = "w", **odd: dict[str, Any]) -> Path:
    """A tar archive of these members, in this order. ``odd``: what else is said of members, by their names."""
    with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            for field, value in {"size": len(data), **odd.get(name, {})}.items():
                setattr(info, field, value)
            archive.addfile(info, io.BytesIO(data))
    return path


ONE = {"a.jpg": b"1", "a.cls": b"1"}


def test_shards_give_what_folders_give(tmp_path: Path) -> None:
    write(tmp_path / "folders")
    folders = image_classification.ImageFolder(tmp_path / "folders")
    members: dict[str, bytes] = {}
    for number, (path, label) in enumerate(zip(folders.paths, folders.labels, strict=True)):
        members[f"photographs/{number:04}.{Path(path).suffix[1:].upper()}"] = Path(path).read_bytes()
        members[f"photographs/{number:04}.cls"] = str(label).encode()
        members[f"photographs/{number:04}.note.txt"] = b"left alone"
    names = list(members)
    half = 3 * (len(folders) // 2)
    shard(tmp_path / "train-1.tar", {name: members[name] for name in names[half:]})
    shard(tmp_path / "train-0.tar", {name: members[name] for name in names[:half]})
    shards: Any = TarShards(tmp_path / "train-*.tar")
    assert len(shards) == len(folders) and shards.labels.tolist() == folders.labels
    pipeline = image_classification.build(size=32)
    for number in range(len(folders)):
        one, other = pipeline.run(folders[number], 7), pipeline.run(shards[number], 7)
        assert np.array_equal(one["image"], other["image"]) and one["label"] == other["label"]
    batches = list(DataLoader(shards, 4, pipeline=pipeline, num_workers=2, lanes=("cpu", "device")))
    assert [label for batch in batches for label in batch["label"].tolist()] == folders.labels


def test_what_macos_leaves_in_archives_and_beside_them_is_no_sample(tmp_path: Path) -> None:
    members = {"./._a.jpg": b"\0\5", "./a.jpg": b"x", "./._a.cls": b"\0\5", "./a.cls": b"3", "__MACOSX/a.jpg": b"\0"}
    members |= {"./c/.ipynb_checkpoints/a-checkpoint.jpg": b"y", "./c/Thumbs.db": b"z"}
    shard(tmp_path / "train-0.tar", members)
    (tmp_path / "._train-0.tar").write_bytes(b"\0\5")
    shards = TarShards([tmp_path / "*train-*.tar"])
    assert len(shards.shards) == 1 and shards.labels.tolist() == [3]
    assert bytes(read_bytes(shards[0]["path"])) == b"x"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.jpg": b"x"}, r"has no member \.cls; it has a\.jpg"),
        ({"a.cls": b"1", "b.jpg": b"x", "b.cls": b"2"}, r"has no member \.jpg or .* or \.webp; it has a\.cls"),
        ({"a.jpg": b"x", "a.cls": b"9223372036854775808"}, "'a.cls' of .* is no class number that an int64 holds"),
        ({"a.jpg": b"x", "a.cls": b"cat"}, "'a.cls' of .* is no class number: b'cat'"),
        ({}, "hold no sample"),
    ],
)
def test_what_lacks_something_is_named(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TarShards(shard(tmp_path / "one.tar", members))


def test_files_that_are_no_shards(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no shard matches"):
        TarShards(tmp_path / "absent-*.tar")
    with pytest.raises(ValueError, match="no uncompressed tar archive"):
        TarShards(shard(tmp_path / "packed.tar", {"a.jpg": b"x", "a.cls": b"1"}, "w:gz"))


@pytest.mark.parametrize("linked", ["a.jpg", "a.cls"])
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_is_no_photograph_and_no_label(tmp_path: Path, kind: bytes, linked: str) -> None:
    """Also where all of a sample is links, which else would be missing without a word."""
    shard(tmp_path / "one.tar", ONE, **{linked: {"size": 0, "type": kind, "linkname": "elsewhere"}})
    with pytest.raises(ValueError, match=f"'{linked}' of .* is no file but a link to 'elsewhere'; write shards with"):
        TarShards(tmp_path / "one.tar")


SPARSE: dict[str, dict[str, Any]] = {  # one byte of data at the end of 4096, in both of GNU tar's ways to say so
    "gnu": {"type": tarfile.GNUTYPE_SPARSE},
    "posix": {"pax_headers": {"GNU.sparse.map": "4095,1", "GNU.sparse.size": "4096"}},
}


@pytest.mark.parametrize("sparse", ["a.jpg", "a.cls"])
@pytest.mark.parametrize("way", SPARSE)
def test_a_sparse_member_is_refused(tmp_path: Path, way: str, sparse: str) -> None:
    """What lies in the archive is not what the file has."""
    shard(tmp_path / "one.tar", ONE, **{sparse: SPARSE[way]})
    with tarfile.open(tmp_path / "one.tar") as archive:
        assert [member.name for member in archive if member.issparse()] == [sparse]
    with pytest.raises(ValueError, match=f"'{sparse}' of .* is a sparse file, .*; write shards with all bytes"):
        TarShards(tmp_path / "one.tar")


def many(path: Path) -> tuple[bytearray, list[int]]:
    """A shard of ten samples, and where their members begin, and the end of the archive."""
    shard(path, {f"{n}.{kind}": data for n in range(10) for kind, data in (("jpg", bytes(700)), ("cls", b"1"))})
    with tarfile.open(path) as archive:
        begins = [member.offset for member in archive if member.isfile()]
    assert len(TarShards(path)) == 10
    return bytearray(path.read_bytes()), [*begins, begins[-1] + 2 * tarfile.BLOCKSIZE]


@pytest.mark.parametrize("member", [2, 19])
def test_a_damaged_header_is_not_taken_for_the_end(tmp_path: Path, member: int) -> None:
    data, begins = many(tmp_path / "one.tar")
    data[begins[member] + 10] ^= 1
    (tmp_path / "one.tar").write_bytes(data)
    message = f"one.tar' is damaged or cut off at byte {begins[member]}, .*; copy or write it again"
    with pytest.raises(ValueError, match=message):
        TarShards(tmp_path / "one.tar")


@pytest.mark.parametrize("member", [2, 11, 19])
def test_a_header_of_zeros_is_not_taken_for_the_end(tmp_path: Path, member: int) -> None:
    data, begins = many(tmp_path / "one.tar")
    data[begins[member] : begins[member] + tarfile.BLOCKSIZE] = bytes(tarfile.BLOCKSIZE)
    (tmp_path / "one.tar").write_bytes(data)
    behind = begins[member] + tarfile.BLOCKSIZE if member % 2 else begins[member + 1]  # a photograph's bytes are zeros
    with pytest.raises(ValueError, match=f"one.tar' has more at byte {behind}, .* damaged, and must be copied"):
        TarShards(tmp_path / "one.tar")


@pytest.mark.parametrize("more", [0, 100, 511])
def test_a_shard_that_is_cut_off_between_two_members(tmp_path: Path, more: int) -> None:
    """There, or within the next header."""
    data, begins = many(tmp_path / "one.tar")
    message = "ends at byte {} without the zeros .* truncate --size" if not more else "damaged or cut off at byte {},"
    for at in (begins[10], begins[11], begins[-1]):
        (tmp_path / "one.tar").write_bytes(data[: at + more])
        with pytest.raises(ValueError, match=message.format(at)):
            TarShards(tmp_path / "one.tar")


@pytest.mark.parametrize("kind", ["jpg", "cls", "txt"])
def test_two_members_of_one_kind_in_one_sample(tmp_path: Path, kind: str) -> None:
    """Two samples of one name in a row: one of them would be missing without a word."""
    names = ("a.jpg", "a.cls", "a.txt", f"a.{kind.upper()}", "b.jpg", "b.cls")
    shard(tmp_path / "one.tar", dict.fromkeys(names, b"1"))
    with pytest.raises(ValueError, match=f"'a.{kind.upper()}' of .*one.tar' follows 'a.{kind}', of the same kind"):
        TarShards(tmp_path / "one.tar")
