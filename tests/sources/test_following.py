"""Whether a tier on disk follows the orders of epochs to come: who reads beside this run, and how much there is room
for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from torch.utils.data import DistributedSampler

from minato_gpu.caching.choice import reach
from minato_gpu.caching.orders import Part
from minato_gpu.sampling.lookahead import DistributedOrders
from minato_gpu.sources.disk.records import Room
from minato_gpu.sources.following import Following
from minato_gpu.sources.memory_tier import Begun
from tests.caching.model import Listed

SAMPLES, RANKS, PAGE = 400, 4, 4096
QUARTER = Room(SAMPLES * PAGE // 4, SAMPLES, SAMPLES * PAGE)


def begun(epoch: int = 0, rank: int = 0, ranks: int = RANKS, seed: int = 0) -> Begun:
    return Begun(epoch, DistributedOrders(SAMPLES, True, False, seed, rank, ranks, 0, 1), ranks)


def part_of(begun: Begun) -> Part:
    assert isinstance(begun.orders, DistributedOrders)
    return begun.orders.part(begun.epoch)


def following(*beside: Part | None, of: Begun | None = None, room: Room = QUARTER) -> Following:
    made = Following(SAMPLES)
    made.begin(of or begun(), beside, room)
    return made


def staying(made: Following, epoch: int = 0) -> set[int]:
    return {sample for sample in range(SAMPLES) if made.stays(sample, epoch)}


def coming(ranks: Sequence[int], epochs: float, first: int = 1) -> set[int]:
    """What these ranks read within so many epochs, as torch's sampler has it."""
    found: set[int] = set()
    for place in range(int(np.ceil(epochs))):
        for rank in ranks:
            data: object = range(SAMPLES)
            sampler: DistributedSampler[int] = DistributedSampler(data, RANKS, rank)  # type: ignore[arg-type]
            sampler.set_epoch(first + place)
            order = [*sampler]
            found |= {*order[: int(np.ceil(len(order) * min(1.0, epochs - place)))]}
    return found


def test_what_stays_is_what_this_host_reads_again_soon() -> None:
    made = following()
    assert staying(made) == coming([0], reach(4, 0.25)) != {*range(SAMPLES)}
    assert made.why.startswith("next-use: what this host reads again within 2.89 epochs")
    made.begin(begun(1), [], QUARTER)
    assert staying(made, 1) == coming([0], reach(4, 0.25), first=2)
    assert made.may([]) and not made.may([None])


def test_of_ranks_on_one_directory_what_any_of_them_reads_stays() -> None:
    other = part_of(begun(rank=2))
    made = following(other)
    assert staying(made) == coming([0, 2], reach(2, 0.25))
    assert "ranks 0, 2 read again" in made.why
    assert made.may([other]) and made.may([other._replace(epoch=1)]) and made.may([])
    third = part_of(begun(rank=3))
    assert not made.may([other, third]), "who has come since reads something else"


@pytest.mark.parametrize(
    "other",
    [
        None,
        part_of(begun(rank=1, seed=1)),
        part_of(begun(rank=1, epoch=2)),
    ],
    ids=["unknown", "another seed", "two epochs ahead"],
)
def test_beside_another_run_nothing_goes(other: Part | None) -> None:
    made = following(other)
    assert staying(made) == {*range(SAMPLES)}
    assert made.why == "minio: another run uses the directory"
    assert not made.may([])
    made.begin(begun(1), [], QUARTER)
    assert made.may([]), "it has ended"
    assert not made.may([other]), "and came again"


def test_orders_that_are_not_known_and_draws_with_replacement() -> None:
    for known, why in (
        (Begun(0, None, 1), "minio: the order of epochs to come is not known"),
        (Begun(0, Listed(((0,),)), 4), "minio: the order of epochs to come is not known"),
        (Begun(0, begun().orders, 4, once=False), "minio: keys may come twice"),
    ):
        made = following(of=known)
        assert staying(made) == {*range(SAMPLES)}
        assert made.why.startswith(why) and not made.may([])


def test_until_sizes_are_known_all_stays() -> None:
    made = following(room=Room(SAMPLES * PAGE // 4, 0, 0))
    assert made.why == "minio: it is not known yet how much there is room for"
    for _ in range(15):
        made.read(PAGE - 7)
    assert staying(made) == {*range(SAMPLES)}
    made.read(PAGE)
    assert staying(made) == coming([0], reach(4, 0.25))
    for _ in range(112):
        made.read(3 * PAGE)
    assert staying(made) == coming([0], reach(4, 0.25 * 128 / (16 + 3 * 112))), "it is looked again"


def test_of_sources_that_samples_have_in_common_nothing_goes() -> None:
    """What one of them will not need soon another may."""
    made = following()
    for sample in range(SAMPLES):
        made.wanted(sample, [(f"/{sample}", 0, None)])
        made.wanted(sample, [(f"/{sample}", 0, None)])
    made.wanted(1, [("/0", 0, None)])
    made.wanted(-1, [("/0", 0, None)])
    made.wanted(2**70, [("/0", 0, None)])
    assert made.may([]), "a few are no matter"
    for sample in range(50):
        made.wanted(sample, [(f"/{sample // 5}", 0, None)])
    assert made.why == "minio: samples have sources in common"
    made.begin(begun(1), [], QUARTER)
    assert staying(made, 1) == {*range(SAMPLES)} and not made.may([])
