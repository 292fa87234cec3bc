"""Whether a cache on disk follows the orders of epochs to come: who else uses the directory, and how much there is room
for."""

from __future__ import annotations

import numpy as np
from torch.utils.data import DistributedSampler

from minato_gpu.caching.choice import reach
from minato_gpu.sampling.lookahead import DistributedOrders
from minato_gpu.sources.disk.tier import Room
from minato_gpu.sources.disk_retention import DiskRetention
from minato_gpu.sources.memory_tier import Begun
from tests.caching.model import Listed

SAMPLES, RANKS, PAGE = 400, 4, 4096
QUARTER = Room(SAMPLES * PAGE // 4, SAMPLES, SAMPLES * PAGE)


def begun(epoch: int = 0) -> Begun:
    return Begun(epoch, DistributedOrders(SAMPLES, True, False, 0, 0, RANKS, 0), RANKS)


def following(of: Begun | None = None, room: Room = QUARTER, *, alone: bool = True) -> DiskRetention:
    made = DiskRetention(SAMPLES)
    made.begin(of or begun(), alone, room)
    return made


def staying(made: DiskRetention, epoch: int = 0) -> set[int]:
    return {sample for sample in range(SAMPLES) if made.stays(sample, epoch)}


def coming(epochs: float, first: int = 1) -> set[int]:
    """What the first rank reads within so many epochs, as torch's sampler has it."""
    found: set[int] = set()
    for place in range(int(np.ceil(epochs))):
        data: object = range(SAMPLES)
        sampler: DistributedSampler[int] = DistributedSampler(data, RANKS, 0)  # type: ignore[arg-type]
        sampler.set_epoch(first + place)
        order = [*sampler]
        found |= {*order[: int(np.ceil(len(order) * min(1.0, epochs - place)))]}
    return found


def test_what_stays_is_what_this_host_reads_again_soon() -> None:
    made = following()
    assert staying(made) == coming(reach(4, 0.25)) != {*range(SAMPLES)}
    assert made.why.startswith("next-use: what this host reads again within 2.89 epochs")
    made.begin(begun(1), True, QUARTER)
    assert staying(made, 1) == coming(reach(4, 0.25), first=2)


def test_beside_another_run_all_stays() -> None:
    made = following(alone=False)
    assert staying(made) == {*range(SAMPLES)}
    assert made.why == "minio: another run uses the directory"
    made.begin(begun(1), True, QUARTER)
    assert staying(made, 1) == coming(reach(4, 0.25), first=2), "it has ended"


def test_orders_that_are_not_known_and_draws_with_replacement() -> None:
    for known, why in (
        (Begun(0, None, 1), "minio: the order of epochs to come is not known"),
        (Begun(0, Listed(((0,),)), 4), "minio: the order of epochs to come is not known"),
        (Begun(0, begun().orders, 4, once=False), "minio: keys may come twice"),
    ):
        made = following(known)
        assert staying(made) == {*range(SAMPLES)}
        assert made.why.startswith(why)


def test_until_sizes_are_known_all_stays() -> None:
    made = following(room=Room(SAMPLES * PAGE // 4, 0, 0))
    assert made.why == "minio: it is not known yet how much there is room for"
    for _ in range(15):
        made.read(PAGE - 100)
    assert staying(made) == {*range(SAMPLES)}
    made.read(PAGE - 100)
    assert staying(made) == coming(reach(4, 0.25))
    for _ in range(112):
        made.read(3 * PAGE - 100)
    assert staying(made) == coming(reach(4, 0.25 * 128 / (16 + 3 * 112))), "it is looked again"
