"""Where a sampler's order stands, as plain data.

One rule for every sampler: a state holds a snapshot of what yields the keys, and which keys come before what that will
yield; from there on, what was delivered is drawn again and dropped. Only the snapshot differs (sampler_restore.py): the
generators as the epoch began, the sampler's own state, or none, where all that is left is stored.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice

from minato_gpu.checkpoint import ranks
from minato_gpu.checkpoint import state as s
from minato_gpu.lanes.streams import is_stateful
from minato_gpu.packing import packed, packed_state
from minato_gpu.samples import Key, witness_of
from minato_gpu.sampling.delivered import DeliveredPositions
from minato_gpu.sampling.occurrences import Occurrences
from minato_gpu.sampling.orders import KEYS, REPLAY, Order
from minato_gpu.sampling.sampler_restore import ENOUGH
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.sampling.sources import Mark, Source
from minato_gpu.snapshots import Snapshot


class Cursor:
    """Tells where the order of one epoch stands. ``gone``: of the whole, before it was dealt out to these ranks."""

    def __init__(self, sampling: Sampling, source: Source, gone: s.State | None) -> None:
        self._sampling = sampling
        self._source = source
        self._gone = gone
        self._remaining: _Remaining | None = None

    def plain(self, delivered: DeliveredPositions) -> s.State:
        """The way back to what comes after these. Raises ValueError where it cannot be told."""
        source = self._source
        out = {**self._sampling.describe(), "way": source.order.way, "set_epoch": source.told_epoch}
        out["rank"] = ranks.rank_of(self._sampling)
        if source.order.way == REPLAY:
            for below, crc in reversed(source.digests):
                if 0 < below <= delivered.low:
                    out["digest"] = {"below": below, "crc": crc}
                    break
            if self._sampling.uses_default_generator:  # anybody may have seeded that as it was before
                out["order_drawn"] = source.order.begun_from is not None
            return {**out, "witness": source.witness, "gone": self._gone and self._gone.copy()}
        if source.order.way == KEYS:
            self._remaining = self._remaining or _Remaining(source)
        first = bisect_right(source.marks, delivered.low, key=lambda mark: mark.end)
        marks = list(islice(source.marks, first, None))
        place, position = (marks[0].place, marks[0].position) if marks else (source.place, source.position)
        out = {**out, "place": place, "position": position}
        if self._remaining is not None:
            nested = {"nested": told_between(self._sampling, source.order)["nested"]}
            return {**out, "state": nested, "ended": True, **self._remaining.since(place, position)}
        return {**out, **_state_of_sampler(source, marks)}


def _state_of_sampler(source: Source, marks: list[Mark]) -> s.State:
    """The sampler's own state, the first that is known since ``marks`` begin, and the keys drawn before it."""
    order = source.order
    order.begin()  # may draw an item
    coming = [(mark.state, mark.keys) for mark in marks]
    coming += [(state, source.keys_of(item)) for state, item in order.coming]
    known = next((at for at, (state, _) in enumerate(coming) if state is not None), len(coming))
    wanted = ENOUGH if order.moved else 0
    if known == len(coming):  # of an epoch's last key a sampler may have the state that it has before the next one's
        wanted = max(wanted, 1)
    while sum(len(keys) for _, keys in coming[known:]) < wanted and (foreseen := order.foresee()) is not None:
        coming.append((foreseen[0], source.keys_of(foreseen[1])))
    drawn, following = ([keys for _, keys in part] for part in (coming[:known], coming[known:]))
    own = coming[known][0] if following else None
    ended = own is None and order.ended
    own = order.state() if own is None else own
    if own.error is not None:
        raise ValueError(f"this epoch cannot be saved: {own.error}")
    out: s.State = {"state": own.own.copy(), "ended": ended, **_plain_counts(source.saved(marks))}
    if drawn:
        out.update(_plain(drawn))
    generators = {role: packed_state(state) for role, state in own.generators.items()}
    if generators != order.begun_from:
        out["generators"] = generators
        out.update(_plain_following(following, order.digest))
    return out


def _plain_following(following: list[list[Key]], digest: int) -> s.State:
    """What came after a state, so that it can be told again; nothing where that is not known. ``digest``: of the
    generators after all of it."""
    keys: list[Key] = []
    items = 0
    while items < len(following) and len(keys) < ENOUGH:
        keys, items = keys + following[items], items + 1
    witness = witness_of(keys)
    left = {"generators": digest} if items == len(following) else {}
    return {"next": {"items": items, "witness": witness, **left}} if witness and items else {}


def _plain_counts(occurrences: Occurrences) -> s.State:
    """How often each key had come. Raises ValueError for keys that cannot be stored, where that counts."""
    planes, others = occurrences.planes()
    try:
        plain = [[s.plain_key(key), count] for key, count in others.items()]
    except ValueError:
        if occurrences.used:
            raise
        return {"planes": [], "others": [], "counted": False}
    return {"planes": [[ones, packed(plane)] for ones, plane in planes], "others": plain}


def _plain(drawn: list[list[Key]]) -> s.State:
    try:
        return s.plain_batches(drawn)
    except ValueError as error:
        raise ValueError(
            "this epoch can be saved once its first batch has been delivered: a sampler's own state is known only when "
            f"it has yielded a key, and what came before that must be stored. {error}"
        ) from None


class _Remaining:
    """What a sampler of unknown kind still yields, as plain data: drawn and made plain once, then only cut.

    It begins where the first save finds the oldest batch that may be asked for; later ones begin further on.
    """

    def __init__(self, source: Source) -> None:
        first = source.marks[0] if source.marks else source
        marked = [mark.keys for mark in source.marks]
        source.order.draw_rest()
        batches = marked + [source.keys_of(item) for _, item in source.order.coming]
        before = source.occurrences.before([key for keys in marked for key in keys])
        self._place, self._position = first.place, first.position
        self._plain = s.plain_batches(batches)
        self._batches = self._plain["drawn"]
        self._flat = not any(type(key) is list for keys in self._batches for key in keys)
        self._occurrences = before.count([key for keys in batches for key in keys]) or []

    def since(self, place: int, position: int) -> s.State:
        """What comes from this batch on, as the caller's own: nothing that is done to it changes a later state."""
        batches = self._batches[place - self._place :]
        return {
            **self._plain,
            "drawn": [keys.copy() for keys in batches] if self._flat else Snapshot(batches).copy(),
            "occurrences": self._occurrences[position - self._position :],
        }


def told_between(sampling: Sampling, order: Order | None) -> s.State:
    """The states of the sampler, and of one nested in it, after ``order``, all of which has been drawn."""
    parts = {"sampler": sampling.inner, "nested": sampling.nested}
    if order is not None and order.untold is not None:
        given = order.untold.copy()
        return {name: given.get(name) for name in parts}
    return {name: Snapshot(part.state_dict()).copy() if is_stateful(part) else None for name, part in parts.items()}
