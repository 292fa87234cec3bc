"""One rank for each device under torchrun: equal batch counts, disjoint indices, and together the whole data set."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.contracts import ranks_program
from tests.support.programs import Program, kept_free

RANKS = 2


def results_of(folder: Path, program: Path, ranks: int, *arguments: str) -> list[dict[str, Any]]:
    """What each rank of a program under torchrun has written into the folder."""
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={ranks}", str(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


def results_without_torchrun(folder: Path, program: str, *arguments: str) -> list[dict[str, Any]]:
    """The same of a module that is told what torchrun, which takes long to start, would tell it."""
    with kept_free() as port:
        common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        of_each = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
        ranks = [Program(program, *arguments, environment=one, at_once=True) for one in of_each]
        for rank in ranks:
            _, errors = rank.communicate()
            assert rank.returncode == 0, errors[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]


def run_ranks(
    folder: Path, length: int, lanes: str, bad: str = "", devices: int = 1, *, torchrun: bool = False
) -> list[dict[str, Any]]:
    """What each rank of ``ranks_program`` has seen."""
    arguments = (str(folder), str(length), lanes, bad, str(devices))
    if torchrun:
        return results_of(folder, Path(ranks_program.__file__), RANKS, *arguments)
    return results_without_torchrun(folder, ranks_program.__name__, *arguments)


@pytest.mark.parametrize(
    ("length", "lanes", "devices", "torchrun"),
    [
        (48, "cpu", 1, False),
        pytest.param(48, "cpu", 1, True, marks=pytest.mark.on_request),
        (45, "cpu+device", 1, False),
        (45, "device", 2, False),
    ],
)
def test_ranks_share_an_epoch_out(tmp_path: Path, length: int, lanes: str, devices: int, torchrun: bool) -> None:
    """Where ranks do not divide the data set, ``DistributedSampler`` repeats a sample or so to make counts equal."""
    ranks = run_ranks(tmp_path, length, lanes, devices=devices, torchrun=torchrun)
    assert len({rank["steps"] for rank in ranks}) == 1
    for epoch in range(ranks_program.EPOCHS):
        seen = Counter(label for rank in ranks for label in rank["seen"][epoch])
        assert sorted(seen) == list(range(length))
        assert seen.total() == -(-length // RANKS) * RANKS
    assert ranks[0]["seen"][0] != ranks[0]["seen"][1], "another order in each epoch"


def test_a_rank_that_loses_batches_keeps_in_step(tmp_path: Path) -> None:
    """The other rank waits for it in every step. Its third and fourth batch of the first epoch cannot be read."""
    bad = ranks_program.order(48, rank=1, epoch=0)[8:16]
    ranks = run_ranks(tmp_path, 48, "cpu", ",".join(map(str, bad)))
    assert ranks[0]["steps"] == ranks[1]["steps"] == 2 * 6
    seen = [Counter(label for rank in ranks for label in rank["seen"][epoch]) for epoch in range(2)]
    assert set(seen[0]) == set(seen[1]) == set(range(48)) - set(bad)
    assert sum(rank["padded"] for rank in ranks) == sum(count.total() - len(count) for count in seen) >= 2
