"""What a state of an epoch must keep to, whatever file it came from: parts that fit together, and this loader.

What only the sampler can tell is checked while it is drawn (sampling/sources.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minato_gpu.checkpoint import state as s
from minato_gpu.checkpoint.progress import is_iterable
from minato_gpu.sampling.delivered import DeliveredPositions
from minato_gpu.sampling.orders import REPLAY
from minato_gpu.sampling.samplers import Sampling


def match_kind(loader: Any, state: s.State) -> None:
    """A data set of the same kind."""
    if (state["kind"] == "iterable") != is_iterable(loader):
        raise ValueError(f"the state is one of a data set of kind {state['kind']!r}, and this loader has another")


def match_progress(loader: Any, delivered: DeliveredPositions, sampling: Sampling, source: Mapping[str, Any]) -> None:
    """Batches and samples must fit together, and an order with gaps needs a loader that can fill them."""
    if delivered.above and (loader.in_order or loader.max_lateness == 0):
        raise ValueError(
            "the state was saved with batches delivered out of order, which a loader in strict order cannot go on "
            "with; pass in_order=False"
        )
    if delivered.above and loader.num_workers == 0:
        raise ValueError("the state was saved with batches delivered out of order; pass num_workers=1 or more")
    if sampling.size is None:
        return
    length = sampling.describe()["length"] if source["way"] == REPLAY else None
    samples, batches, size = delivered.samples, delivered.batches, sampling.size
    if length is not None and delivered.top > length:
        raise ValueError(f"state: delivered up to position {delivered.top}, and the sampler ends at {length}")
    length = None if source.get("rank") is not None else length  # one rank's share is not what the sampler tells
    short = (batches - 1) * size < samples < batches * size and length in (None, samples)  # the epoch's last batch
    short = short and not delivered.above  # all that came before it
    if samples != batches * size and not short:
        raise ValueError(f"state: {batches} batches of {size} cannot hold {samples} samples")


def match_place(source: Mapping[str, Any], delivered: DeliveredPositions, size: int | None) -> None:
    """The batch at which a stored order begins is the first that was not delivered whole."""
    place = s.number(source, "place", largest=delivered.batches)
    position = s.number(source, "position", largest=delivered.low)
    if size is not None and not (place - 1) * size < position <= place * size:
        raise ValueError(f"state: place {place} of batches of {size} is not at position {position}")


def match_stored(source: Mapping[str, Any], delivered: DeliveredPositions, stored: list[list[Any]]) -> None:
    """What was delivered lies before the end of the stored order."""
    batches, end = source["place"] + len(stored), source["position"] + sum(map(len, stored))
    if delivered.batches > batches or delivered.top > end:
        raise ValueError(
            f"state: {delivered.batches} batches delivered up to position {delivered.top}, and the stored order ends "
            f"after {batches} at {end}"
        )


def stored_batches(saved: Mapping[str, Any], name: str) -> list[list[Any]]:
    """Keys that are stored batch by batch."""
    batches = [s.sequence({"batch": keys}, "batch") for keys in s.sequence(saved, name)]
    if not all(batches):
        raise ValueError("state: a batch of no keys")
    return [[s.key_of(key) for key in keys] for keys in batches]


def match_size(stored: list[list[Any]], size: int | None, *, short: bool) -> None:
    """Stored batches are as a sampler's keys are cut; ``short``: they may end with the epoch's last, a short one."""
    for number, keys in enumerate(stored, 1):
        last = short and number == len(stored)
        if size is not None and len(keys) != size and not (last and len(keys) < size):
            raise ValueError(f"state: a stored batch of {len(keys)} keys among batches of {size}")
