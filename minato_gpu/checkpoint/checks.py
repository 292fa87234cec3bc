"""Checks of a state, whatever file it came from: its parts fit together, and it fits this loader.

What only the sampler can tell is checked while it is drawn (sampling/epoch_batches.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from minato_gpu.arguments import Arguments
from minato_gpu.checkpoint import state as s
from minato_gpu.checkpoint.streams import MOST_READ_AGAIN
from minato_gpu.samples import JSON, Key, name_of
from minato_gpu.sampling.delivered_positions import DeliveredPositions
from minato_gpu.sampling.occurrences import Plane
from minato_gpu.sampling.order import ENOUGH, KEYS, REPLAY, NextKeys
from minato_gpu.sampling.samplers import Sampling, length_of

Counted = tuple[list[Plane], dict[Key, int]]
_MOST_PLANES = 255  # indices that come more often are counted in 'others'


def most_drawn_again(loader: Arguments) -> int:
    """Returns how many keys a resume may draw again: those of a pass over the data set, or as many as samples of a
    stream.

    How many a sampler yields may be a number that nobody could wait for.
    """
    return max(MOST_READ_AGAIN, length_of(loader.dataset) or 0)


def check_drawn_again(position: int, below: int, most: int) -> None:
    """Raises ValueError if a resume draws more than ``most`` keys again, from ``position`` to ``below``."""
    if below - position > most:
        raise ValueError(
            f"state: 'below' tells of {below} samples delivered. Their keys would have to be drawn again from position "
            f"{position} on, and at most {most} are; give the sampler state_dict() and load_state_dict(), which the "
            "loader then uses"
        )


def match_progress(
    loader: Arguments, delivered: DeliveredPositions, sampling: Sampling, source: Mapping[str, JSON]
) -> None:
    """Checks that batches and samples fit together, and that a loader can fill an order with gaps."""
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


def stored(
    source: Mapping[str, JSON], delivered: DeliveredPositions, sampling: Sampling
) -> tuple[list[list[Key]], Counted]:
    """Reads an order that begins with a sampler's state or with stored keys.

    Returns the keys that come before what the sampler yields, and how often each had come before those. Raises
    ValueError if they do not fit.
    """
    place, position, size = s.number(source, "place"), s.number(source, "position"), sampling.size
    if place > delivered.batches or position > delivered.low:
        raise ValueError(f"state: place {place} at position {position} lies after what was delivered")
    if size is not None and not (place - 1) * size < position <= place * size:
        raise ValueError(f"state: place {place} of batches of {size} is not at position {position}")
    s.mapping(source, "state")
    ended = s.choice(source, "ended", (True,) if source["way"] == KEYS else (True, False))
    if not ended:
        following(source)
    batches = s.batches_of(source) if source.get("drawn") is not None else []
    _match_size(batches, sampling.size if sampling.batched else 1, short=ended and not sampling.drop_last)
    last, end = place + len(batches), position + sum(map(len, batches))
    if ended and (delivered.batches > last or delivered.top > end):
        raise ValueError(
            f"state: {delivered.batches} batches delivered up to position {delivered.top}, and the stored order ends "
            f"after {last} at {end}"
        )
    known = source.get("occurrences") is not None
    return batches, ([], _stored_counts(source, batches)) if known else _counts(source)


def _match_size(stored: list[list[Key]], size: int | None, *, short: bool) -> None:
    """Checks that stored batches are as a sampler's keys are cut; with ``short`` they may end with the epoch's last,
    short one."""
    for number, keys in enumerate(stored, 1):
        last = short and number == len(stored)
        if size is not None and len(keys) != size and not (last and len(keys) < size):
            raise ValueError(f"state: a stored batch of {len(keys)} keys among batches of {size}")


def following(source: Mapping[str, JSON]) -> NextKeys:
    """Returns the check of the keys that came after the sampler's own state."""
    plain = s.mapping(source, "next")
    return NextKeys(s.number(plain, "items", 1, ENOUGH), s.number(plain, "witness"))


def _counts(source: Mapping[str, JSON]) -> Counted:
    """Returns how often each key had come before, from a state with the sampler's own state."""
    others: dict[Key, int] = {}
    for pair in s.sequence(source, "others"):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(f"state: 'others' must hold pairs of a key and a count, got {s.quoted(pair)}")
        others[name_of(s.key_of(pair[0]))] = s.number({"count": pair[1]}, "count")
    if len(planes := s.sequence(source, "planes")) > _MOST_PLANES:
        raise ValueError(f"state: 'planes' has {len(planes)} entries, {_MOST_PLANES} at most")
    return [_plane(plane) for plane in planes], others


def _plane(plane: JSON) -> Plane:
    if not isinstance(plane, (list, tuple)) or len(plane) != 2:
        raise ValueError(f"state: 'planes' must hold pairs of a number and bits, got {s.quoted(plane)}")
    return s.number({"planes": plane[0]}, "planes"), s.unpacked({"planes": plane[1]}, "planes")


def _stored_counts(source: Mapping[str, JSON], stored: list[list[Key]]) -> dict[Key, int]:
    """Returns how often each key had come before, from a state with the remaining keys.

    The first of each key that remains says how many came before it.
    """
    keys, counts = [key for batch in stored for key in batch], s.sequence(source, "occurrences")
    if counts and len(counts) != len(keys):
        raise ValueError(f"state: {len(counts)} occurrences for {len(keys)} keys")
    before: dict[Key, int] = {}
    for key, count in zip(keys, counts, strict=False):
        before.setdefault(name_of(key), s.number({"occurrences": count}, "occurrences"))
    return {key: count for key, count in before.items() if count}
