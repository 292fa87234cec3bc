"""How hosts find each other: by a list of addresses, or by torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

from minato_gpu import DataLoader
from minato_gpu.sources.cluster_token import TOKEN
from minato_gpu.sources.peer_discovery import ADDRESS, checked_peers
from minato_gpu.sources.source import Source
from tests.sources.test_peers import _token

_ = _token


class Named(Dataset[int]):
    """Samples with sources."""

    def __len__(self) -> int:
        return 4

    def source(self, key: int) -> Source:
        return Source(f"/{key}")

    def __getitem__(self, key: int) -> int:
        return key


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cache_peers": ["a:1", "b:1"]}, "pass share and cache"),
        ({"cache_peers": ["a:1", "b:1"], "share": "x"}, "pass share and cache"),
        ({"cache_peers": "node1:7500", "share": "x", "cache": "1MB"}, "a list of each host's address"),
        ({"cache_peers": ["node1"], "share": "x", "cache": "1MB"}, "a host and a port"),
        ({"cache_peers": [3], "share": "x", "cache": "1MB"}, "must be a text"),
        ({"cache_peers": ["127.0.0.1:1"], "share": "x", "cache": "1MB"}, "two hosts or more"),
        ({"cache_peers": ["127.0.0.1:1", "127.0.0.1:1"], "share": "x", "cache": "1MB"}, "each once"),
        ({"cache_peers": ["127.0.0.1:1", "127.0.0.1:2"], "share": "x", "cache": "1MB"}, "more than one"),
        ({"cache_peers": ["203.0.113.1:1", "203.0.113.2:1"], "share": "x", "cache": "1MB"}, "none of"),
        ({"cache_peers": "auto", "share": "x", "cache": "1MB"}, "torchrun"),
    ],
)
def test_bad_arguments_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        DataLoader(Named(), num_workers=1, **given)


def test_a_token_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN)
    with pytest.raises(ValueError, match=f"{TOKEN} is not set"):
        DataLoader(Named(), num_workers=1, cache_peers=["127.0.0.1:1", "203.0.113.1:1"], share="x", cache="1MB")


def test_this_host_is_found_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked_peers(["203.0.113.1:7", "127.0.0.1:8"]) == ("127.0.0.1:8", "203.0.113.1:7", "127.0.0.1:8")
    monkeypatch.setenv(ADDRESS, "127.0.0.1:9")
    with pytest.raises(ValueError, match="none of cache_peers"):
        checked_peers(["203.0.113.1:7", "127.0.0.1:8"])


_HOST = """
import os, sys, time
from pathlib import Path
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
os.environ |= {
    "XDG_RUNTIME_DIR": str(folder / f"runtime{rank}"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[3],
    "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job",
}
from torch.utils.data import DistributedSampler
from minato_gpu import DataLoader, Source, read_bytes

class Files:
    def __len__(self):
        return 40

    def source(self, key):
        return Source(str(folder / "files" / str(key)))

    def __getitem__(self, key):
        return int(read_bytes(self.source(key))[0]), key

sampler = DistributedSampler(Files(), 2, rank, seed=1)
loader = DataLoader(
    Files(), 5, sampler=sampler, num_workers=1, share=True, cache="10MB", cache_peers="auto"
)
for epoch in range(1000):
    sampler.set_epoch(epoch)
    for values, keys in loader:
        assert values.tolist() == keys.tolist()
    reads = loader.stats()["reads"]
    print(epoch, reads["reads"], reads["from_peers"], reads["peers"]["hosts"], reads["peers"]["why"] or "-", flush=True)
    if sys.stdin.readline() == "end\\n":  # all have come so far
        break
"""


def test_hosts_of_a_torchrun_job_find_each_other_and_read_storage_once(tmp_path: Path) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    (tmp_path / "files").mkdir()
    for number in range(40):
        (tmp_path / "files" / str(number)).write_bytes(bytes([number]) * 100)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    jobs = []
    for rank in range(2):
        (tmp_path / f"runtime{rank}").mkdir(0o700)
        arguments = [sys.executable, "-W", "error", "-c", _HOST, str(rank), str(tmp_path), str(store.port)]
        jobs.append(subprocess.Popen(arguments, **pipes))  # type: ignore[call-overload]
    try:
        rows: list[list[str]] = []

        def epoch(then: str) -> None:
            rows[:] = [job.stdout.readline().split() for job in jobs]
            assert all(rows), "a host has ended"
            for job in jobs:
                job.stdin.write(f"{then}\n")
                job.stdin.flush()

        epoch("on")
        while any(row[3:] != ["2", "-"] for row in rows):  # until they have found each other
            epoch("on")
        for then in ("on", "on", "end"):  # the first of these may have been begun before that
            epoch(then)
        assert [job.wait(60) for job in jobs] == [0, 0]
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
    assert all(row[1] == "0" and int(row[2]) > 0 and row[3:] == ["2", "-"] for row in rows), rows
