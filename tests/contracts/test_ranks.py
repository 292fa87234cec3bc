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

RANKS = 2


def run_ranks(folder: Path, length: int, lanes: str) -> list[dict[str, Any]]:
    """What each rank has seen."""
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    program = [f"--nproc-per-node={RANKS}", ranks_program.__file__, str(folder), str(length), lanes]
    done = subprocess.run([*torchrun, *program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]


@pytest.mark.parametrize(("length", "lanes"), [(48, "cpu"), (48, "cpu+device"), (45, "device")])
def test_ranks_share_an_epoch_out(tmp_path: Path, length: int, lanes: str) -> None:
    """Where ranks do not divide the data set, ``DistributedSampler`` repeats a sample or so to make counts equal."""
    ranks = run_ranks(tmp_path, length, lanes)
    assert len({rank["steps"] for rank in ranks}) == 1
    for epoch in range(ranks_program.EPOCHS):
        seen = Counter(label for rank in ranks for label in rank["seen"][epoch])
        assert sorted(seen) == list(range(length))
        assert seen.total() == -(-length // RANKS) * RANKS
    assert ranks[0]["seen"][0] != ranks[0]["seen"][1], "another order in each epoch"
