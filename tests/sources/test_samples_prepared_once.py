"""Loaders of one host that prepare each sample once: what they deliver is what each would alone, whatever happens."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader
from minato_gpu.sources import host_reader, sent_samples
from minato_gpu.sources.prepared_samples import COMPARED
from minato_gpu.sources.process import ReaderSettings
from tests.sources.test_host_reader import connected, folder

pytestmark = pytest.mark.usefixtures("no_leaks", "folder")

SAMPLES, BATCH = 160, 8
_ = folder


class Costly:
    """Samples of several kinds of fields, which take a while, and draw. A file notes which have been prepared."""

    def __init__(self, folder: Path, seconds: float = 4e-3) -> None:
        self.log, self.seconds = folder / "prepared", seconds

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, key: int) -> Any:
        with self.log.open("a") as file:
            file.write(f"{key}\n")
        time.sleep(self.seconds)
        image = np.full((3, 50), key, np.float32) + np.random.default_rng(0).random(50, np.float32)
        drawn = torch.rand(4000)
        return {"key": key, "image": image, "drawn": drawn, "name": f"sample {key}", "odd": self._odd()}

    def _odd(self) -> int:
        return 0


class Odd(Costly):
    """Samples that are not the same for every loader, although these are equal."""

    def _odd(self) -> int:
        return os.getpid()


@pytest.fixture(autouse=True)
def lingers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(host_reader, "LINGER_S", 0.1)


def loader_of(data: Any, batch: int = BATCH, seed: int = 3, **more: Any) -> Any:
    arguments = {"share": "one", "share_budget": "100MB", "shuffle": True, "num_workers": 2, **more}
    return DataLoader(data, batch, generator=torch.Generator().manual_seed(seed), **arguments)


def alone(data: Any, **more: Any) -> list[Any]:
    """What a loader delivers that shares nothing."""
    found = [plain(batch) for batch in loader_of(data, **{**more, "share": None, "share_budget": None})]
    data.log.unlink()
    return found


def plain(batch: Any) -> Any:
    return {name: each.numpy().tobytes() if isinstance(each, torch.Tensor) else each for name, each in batch.items()}


def in_step(loaders: Sequence[Any]) -> Iterator[list[Any]]:
    """Batches of each."""
    for batches in zip(*loaders, strict=True):
        yield [plain(batch) for batch in batches]


def prepared(data: Any) -> int:
    return len(data.log.read_text().split())


def shared(loader: Any) -> dict[str, Any]:
    found: dict[str, Any] = loader.stats()["share"]
    return found


def test_each_sample_is_prepared_once(tmp_path: Path) -> None:
    data = Costly(tmp_path)
    wanted = alone(data)
    loaders = [loader_of(data, persistent_workers=True) for _ in range(3)]
    for epoch in range(2):
        got = [*zip(*in_step(loaders), strict=True)]
        assert all((list(each) == wanted) == (epoch == 0) for each in got)
        assert got[0] == got[1] == got[2]
    once, again, copied = (
        2 * SAMPLES,
        *(sum(shared(loader)[name] for loader in loaders) for name in ("again", "copied")),
    )
    assert once <= prepared(data) <= once + again + 0.02 * once  # what is counted last may not be told yet
    # a loader that comes when two others have had a sample prepares it without knowing that it was there
    assert 1.96 * once <= again + copied <= 2 * once
    assert again <= once  # twice COMPARED, and more where the machine is busy


def batch_of(samples: list[Any]) -> dict[str, Any]:
    return dict(torch.utils.data.default_collate(samples))


def test_batches_that_workers_join_are_not_waited_for_as_a_whole(tmp_path: Path) -> None:
    """Else two loaders would each wait for samples of a batch that the other begins once it has the whole batch."""
    data = Costly(tmp_path)
    wanted = alone(data, collate_fn=batch_of)
    loaders = [loader_of(data, collate_fn=batch_of) for _ in range(2)]
    assert [[*each] for each in zip(*in_step(loaders), strict=True)] == [wanted, wanted]
    assert sum(shared(loader)["again"] for loader in loaders) <= COMPARED + 0.1 * SAMPLES


@pytest.mark.parametrize("noise", [b"noise", bytes(24) + b"because", bytes(24)])
def test_one_that_sends_noise(tmp_path: Path, noise: bytes) -> None:
    data = Costly(tmp_path)
    wanted = alone(data)
    loader = loader_of(data)
    batches = iter(loader)
    got = [plain(next(batches))]
    theirs, ours = sent_samples.pair()
    with connected() as noisy, theirs, ours:
        socket.send_fds(noisy, [pickle.dumps(ReaderSettings(share_bytes=1))], [theirs.fileno()])
        ours.send(noise)
        os.ftruncate(file := os.memfd_create("noise"), 1000)
        socket.send_fds(ours, [noise], [file])
        os.close(file)
        assert [*got, *map(plain, batches)] == wanted
    assert loader.stats()["reads"]["process"] == "runs"


# --- what is not shared, which is said -------------------------------------------------------------------------------


def is_not_shared(data: Any, caplog: pytest.LogCaptureFixture, why: str, **more: Any) -> None:
    wanted = alone(data, **more)
    loaders = [loader_of(data, **more), loader_of(data, **more)]
    got = [*zip(*in_step(loaders), strict=True)]
    assert [[*each] for each in got] == [wanted, wanted]
    assert why in caplog.text


def test_samples_that_are_not_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A data set that looks at its process: each loader's own come, and it is a warning."""
    data = Odd(tmp_path)
    found = zip(*in_step([loader_of(data), loader_of(data)]), strict=True)
    one, other = ({*np.frombuffer(b"".join(batch["odd"] for batch in got), np.int64).tolist()} for got in found)
    assert one and other and not one & other
    assert "is not the same, bit for bit" in caplog.text


class Unsendable(Costly):
    """Samples that no pickle is made of; the ``collate_fn`` leaves that out."""

    def _odd(self) -> Any:
        return lambda: 0


def without_odd(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(
        [{name: each for name, each in one.items() if name != "odd"} for one in samples]
    )


def test_samples_that_cannot_be_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    is_not_shared(Unsendable(tmp_path), caplog, "a sample cannot be sent", collate_fn=without_odd)


def test_what_has_no_fingerprint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data: Any = Costly(tmp_path)
    data.local = lambda: 0
    is_not_shared(data, caplog, "this loader shares no prepared samples: whether others")


def test_threads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = Costly(tmp_path)
    loader = loader_of(data, worker_kind="thread")
    assert sum(len(batch["key"]) for batch in loader) == SAMPLES
    assert "threads draw from generators" in caplog.text and "share" not in loader.stats()


def test_another_seed_or_another_data_set_shares_nothing(tmp_path: Path) -> None:
    data, other = Costly(tmp_path), Costly(tmp_path, 3e-3)
    loaders = [loader_of(data, num_workers=1), loader_of(data, seed=2, num_workers=1), loader_of(other, num_workers=1)]
    for batches in in_step(loaders):
        assert len({batch["drawn"] for batch in batches[:2]}) == 2
    assert prepared(data) == 3 * SAMPLES
    assert [(shared(loader)["copied"], shared(loader)["why_not"]) for loader in loaders] == [(0, "")] * 3
