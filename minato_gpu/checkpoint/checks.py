"""What a state of an epoch must keep to, whatever file it came from: parts that fit together, and this loader.

What only the sampler can tell is checked while it is drawn (sampling/sources.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from minato_gpu.arguments import Arguments
from minato_gpu.checkpoint import state as s
from minato_gpu.samples import JSON, Key, name_of
from minato_gpu.sampling.delivered import DeliveredPositions
from minato_gpu.sampling.occurrences import Plane
from minato_gpu.sampling.orders import KEYS, REPLAY
from minato_gpu.sampling.sampler_restore import ENOUGH, Following
from minato_gpu.sampling.samplers import Sampling

Counted = tuple[list[Plane], dict[Key, int]]
_MOST_PLANES = 255  # indices that come more often are counted in 'others'


def match_progress(
    loader: Arguments, delivered: DeliveredPositions, sampling: Sampling, source: Mapping[str, JSON]
) -> None:
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


def stored(
    source: Mapping[str, JSON], delivered: DeliveredPositions, sampling: Sampling
) -> tuple[list[list[Key]], Counted]:
    """Of an order that is not drawn again: the keys that come before what the sampler yields from its own state, and
    how often each had come before those. Raises ValueError where they do not fit."""
    _match_place(source, delivered, sampling.size)
    s.mapping(source, "state")
    ended = s.choice(source, "ended", (True,) if source["way"] == KEYS else (True, False))
    if source.get("generators") is not None:
        s.generators(s.mapping(source, "generators"))
    following(source)
    batches = s.batches_of(source) if source.get("drawn") is not None else []
    _match_size(batches, sampling.size if sampling.batched else 1, short=ended and not sampling.drop_last)
    if ended:
        _match_stored(source, delivered, batches)
    known = source.get("occurrences") is not None
    return batches, ([], _stored_counts(source, batches)) if known else _counts(source)


def _match_place(source: Mapping[str, JSON], delivered: DeliveredPositions, size: int | None) -> None:
    """The batch at which a stored order begins is the first that was not delivered whole."""
    place = s.number(source, "place", largest=delivered.batches)
    position = s.number(source, "position", largest=delivered.low)
    if size is not None and not (place - 1) * size < position <= place * size:
        raise ValueError(f"state: place {place} of batches of {size} is not at position {position}")


def _match_stored(source: Mapping[str, JSON], delivered: DeliveredPositions, stored: list[list[Key]]) -> None:
    """What was delivered lies before the end of the stored order."""
    batches, end = source["place"] + len(stored), source["position"] + sum(map(len, stored))
    if delivered.batches > batches or delivered.top > end:
        raise ValueError(
            f"state: {delivered.batches} batches delivered up to position {delivered.top}, and the stored order ends "
            f"after {batches} at {end}"
        )


def _match_size(stored: list[list[Key]], size: int | None, *, short: bool) -> None:
    """Stored batches are as a sampler's keys are cut; ``short``: they may end with the epoch's last, a short one."""
    for number, keys in enumerate(stored, 1):
        last = short and number == len(stored)
        if size is not None and len(keys) != size and not (last and len(keys) < size):
            raise ValueError(f"state: a stored batch of {len(keys)} keys among batches of {size}")


def following(saved: Mapping[str, JSON]) -> Following | None:
    """What came after the sampler's own state, where it says so."""
    if saved.get("next") is None:
        return None
    plain = s.mapping(saved, "next")
    left = None if plain.get("generators") is None else s.number(plain, "generators")
    return Following(s.number(plain, "items", 1, ENOUGH), s.number(plain, "witness", 1), left)


def _counts(saved: Mapping[str, JSON]) -> Counted:
    """How often each key had come before, from a state with the sampler's own."""
    others: dict[Key, int] = {}
    for pair in s.sequence(saved, "others"):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(f"state: 'others' must hold pairs of a key and a count, got {s.quoted(pair)}")
        others[name_of(s.key_of(pair[0]))] = s.number({"count": pair[1]}, "count")
    if len(planes := s.sequence(saved, "planes")) > _MOST_PLANES:
        raise ValueError(f"state: 'planes' has {len(planes)} entries, {_MOST_PLANES} at most")
    return [_plane(plane) for plane in planes], others


def _plane(plane: JSON) -> Plane:
    if not isinstance(plane, (list, tuple)) or len(plane) != 2:
        raise ValueError(f"state: 'planes' must hold pairs of a number and bits, got {s.quoted(plane)}")
    return s.number({"planes": plane[0]}, "planes"), s.unpacked({"planes": plane[1]}, "planes")


def _stored_counts(saved: Mapping[str, JSON], stored: list[list[Key]]) -> dict[Key, int]:
    """The same from a state with the remaining keys: the first of each that remains says how many came before."""
    keys, counts = [key for batch in stored for key in batch], s.sequence(saved, "occurrences")
    if counts and len(counts) != len(keys):
        raise ValueError(f"state: {len(counts)} occurrences for {len(keys)} keys")
    before: dict[Key, int] = {}
    for key, count in zip(keys, counts, strict=False):
        before.setdefault(name_of(key), s.number({"occurrences": count}, "occurrences"))
    return {key: count for key, count in before.items() if count}
