"""What an engine is to do, as the loader's arguments say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minato_gpu.sampling.order_log import OrderLog
from minato_gpu.scheduling.messages import DEVICE
from minato_gpu.scheduling.worker_count import WorkerCount


@dataclass(frozen=True)
class Settings:
    """``window``: batches admitted and not delivered. ``place_size``: samples of a full batch, for lateness. ``homes``:
    which device lanes may prepare the batches of an epoch, in turn. ``streams``: every worker iterates the data set for
    itself, so that nothing is drawn here, and an epoch ends when its streams do. ``timeout``: seconds that the consumer
    waits for a batch, 0 for no limit. ``order_log``: records the order of delivery, or replays one. ``replaces``: a
    worker that dies is replaced, where it can be. ``read_ahead``: batches drawn beyond the window, so that their bytes
    can be read. ``worker_count``: decides how many workers are at work, if their number may change.
    """

    window: int
    place_size: int
    homes: Sequence[str] = (DEVICE,)
    streams: bool = False
    timeout: float = 0.0
    order_log: OrderLog | None = None
    replaces: bool = False
    read_ahead: int = 0
    worker_count: WorkerCount | None = None
