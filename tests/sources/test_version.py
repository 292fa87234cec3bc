"""What a data set declares as the version of a URL: copies of another one are not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minato_gpu import DataLoader, Source, read_bytes
from minato_gpu.sources.disk_pool import name_of, version_of

SAMPLES = 6


class Urls:
    """The first byte of each object, read through fsspec."""

    def __init__(self, root: Path) -> None:
        self.root, self.version = root, "first"

    def __len__(self) -> int:
        return SAMPLES

    def source(self, key: int) -> Source:
        return Source(f"local://{self.root}/{key}", version=self.version)

    def __getitem__(self, key: int) -> int:
        return int(read_bytes(self.source(key))[0])

    def write(self, value: int) -> None:
        for key in range(SAMPLES):
            (self.root / f"{key}").write_bytes(bytes([value]) * 5000)


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_copies_of_another_version_are_not_used(tmp_path: Path, tier: str) -> None:
    (tmp_path / "objects").mkdir()
    urls = Urls(tmp_path / "objects")
    where: dict[str, Any] = {} if tier == "memory" else {"cache_dir": tmp_path / "cache"}
    loader: Any = DataLoader(urls, 2, num_workers=1, cache="8MB", **where)  # type: ignore[arg-type]

    def epoch() -> set[int]:
        return {int(value) for batch in loader for value in batch}

    urls.write(1)
    assert epoch() == {1}
    urls.write(2)
    assert epoch() == {1}, "what lies at a URL is taken to stay as it is"
    assert loader.stats()["cache"][tier]["hits"] == SAMPLES
    urls.version = "second"
    assert epoch() == {2}
    assert loader.stats()["reads"]["by_workers"] == 0
    assert epoch() == {2}
    assert loader.stats()["cache"][tier]["hits"] == SAMPLES


def test_what_tells_versions_apart(tmp_path: Path) -> None:
    plain, tagged = Source("s3://a/1", 2, 3, "one"), Source("s3://a/1", 2, 3, version="tag")
    assert plain != tagged and plain.key != tagged.key
    for source in (plain, tagged):
        assert Source.of(source.key) == source
    assert name_of(plain.key) == name_of(tagged.key), "the new copy takes the old one's place"
    assert (version_of(plain), version_of(tagged)) == (b"", b"tag")
    long = [version_of(Source("s3://a", version=letter * 5000)) for letter in "ab"]
    assert long[0] != long[1] and all(len(each) == 16 for each in long)
    (tmp_path / "file").write_bytes(b"123")
    file = str(tmp_path / "file")
    assert version_of(Source(file, version="tag")) == version_of(Source(file)) + b"tag"
