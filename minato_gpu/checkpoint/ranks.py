"""Merges the states of all ranks of a distributed job into one, for any number of ranks.

``DistributedSampler`` deals one order out to R ranks: position p of rank r is entry p * R + r of the whole. In a merged
state the union of what was delivered is removed from the whole order (it is *gone*); the rest is dealt out anew, and so
on for every further merge. With as many ranks that stood at the same step, each goes on where it was. Entries that only
filled up the last round are not kept: they are repetitions, and ranks fill up their own.

The streams of a ``ShardedDataset`` are kept for each rank; as many ranks go on with their own, others share them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from minato_gpu.caching.future import share
from minato_gpu.checkpoint import state as s
from minato_gpu.checkpoint.streams import places_of, plain_places, shared_out
from minato_gpu.samples import JSON, Key, Value
from minato_gpu.sampling.order import REPLAY
from minato_gpu.sampling.packing import packed
from minato_gpu.sampling.samplers import Sampling, attribute_of
from minato_gpu.util.numbers import is_whole

_MOST_RANKS = 1 << 20
_MOST_ENTRIES = 1 << 36
_SEEDS = "seed", "workers_seed", "workers_epoch", "generators"
_OF_A_RANK = "rank", "witness", "gone", "turn", "streams", "shared_seed"
_SHARES = ("num_replicas", "rank"), ("num_processes", "process_index")


def rank_of(sampling: Sampling) -> s.State | None:
    """Returns which share of the order a sampler has; None if it has all, as far as is known.

    The share has ``replicas`` and ``rank``; of torch's DistributedSampler also ``shuffle``, ``seed`` and ``drop_last``.
    Others have its attributes (``num_replicas`` and ``rank``), or those of Accelerate's batch samplers, or contain a
    sampler that has them; or an iterable data set has them.
    """
    sampler = sampling.inner
    if type(sampler) is not DistributedSampler:
        parts = [sampling.stream] if sampling.iterable else sampling.parts
        named = [[attribute_of(part, name) for name in names] for part in parts for names in _SHARES]
        found = (shares for shares in named if all(map(is_whole, shares)))
        return next(({"replicas": int(replicas), "rank": int(rank)} for replicas, rank in found), None)
    return {
        "replicas": int(sampler.num_replicas),
        "rank": int(sampler.rank),
        "shuffle": sampler.shuffle,
        "seed": sampler.seed,
        "drop_last": sampler.drop_last,
    }


# --- merging --------------------------------------------------------------------------------------------------


@s.within_depth()
def merge_state_dicts(states: Iterable[Mapping[str, JSON]]) -> dict[str, JSON]:
    """Returns one state from those of all ranks, saved at the same step; every rank of the next job loads it.

    Its number of ranks may be another. All ranks must have had the same base seed (``torch.manual_seed``, or equal
    ``generator``): then samples keep their content. Within an epoch this needs torch's ``DistributedSampler``, on a
    map-style data set, or a ``ShardedDataset``. What was delivered, and failed (``max_failures``), counts for all ranks
    together. torch's global generator is set only where it stood alike on all. Between two epochs the ranks' samplers
    must have equal states, no streams may be saved, and a missing rank is not noticed.

    Args:
        states: what ``state_dict`` of each rank's loader returned, in any order.

    Raises:
        TypeError: one of them is no dict.
        ValueError: the states do not belong together, cannot be merged, or a rank is missing.
    """
    all_ = [s.check(state) for state in states]
    if not all_:
        raise ValueError("merge_state_dicts() needs the states of all ranks, got none")
    first = all_[0]
    for name in ("begun", "epoch", "kind"):
        if any(other[name] != first[name] for other in all_):
            values = ", ".join(str(each) for each in dict.fromkeys(state[name] for state in all_))
            raise ValueError(f"merge_state_dicts(): the states differ in {name!r} ({values}); save all at one step")
    rank = first["source"].get("rank")
    if _is_merged(rank) and _all_alike(all_):  # loaded, and saved before the next iter()
        return first
    undealt = rank is None or (first["kind"] == "map" and s.alike(rank, {"replicas": 1, "rank": 0}))
    if len(all_) == 1 and undealt:
        return first
    merged = _begun(all_) if first["begun"] else _between(all_)
    if not _all_alike([{name: state[name] for name in _SEEDS} for state in all_]):
        raise ValueError(
            "merge_state_dicts(): the ranks have other seeds or generators, so that another number of ranks could not "
            "go on with the same samples. Give all ranks the same seed (torch.manual_seed(), or a generator) before "
            "their first iter(); or let every rank resume from its own state, with as many ranks"
        )
    return merged if _all_alike([state.get("global") for state in all_]) else {**merged, "global": None}


def _begun(states: list[s.State]) -> s.State:
    """Merges states in the middle of an epoch.

    Raises ValueError if some ranks are missing, or their samplers differ.
    """
    shares = [_share(state) for state in states]
    replicas, ranks = shares[0]["replicas"], [share["rank"] for share in shares]
    if sorted(ranks) != list(range(replicas)):
        raise ValueError(
            f"merge_state_dicts() needs one state of each of the {replicas} ranks, got ranks {sorted(ranks)}"
        )
    same = [{name: value for name, value in state["source"].items() if name not in _OF_A_RANK} for state in states]
    gone = [state["source"].get("gone") for state in states]
    if not (_all_alike(same) and _all_alike(gone) and _all_alike([{**share, "rank": 0} for share in shares])):
        raise ValueError("merge_state_dicts(): the ranks' samplers differ in more than their rank")
    states = [states[ranks.index(rank)] for rank in range(replicas)]
    source = {**same[0], "rank": {**shares[0], "replicas": None, "rank": None}}
    if states[0]["kind"] == "iterable":
        source["ranks"] = [{name: state["source"].get(name) for name in _OF_A_RANK[3:]} for state in states]
        return {**states[0], "source": source}
    parts = [s.mapping(state, "progress") for state in states]
    source["gone"] = _with_shares(gone[0], parts, s.number(source, "length", largest=_MOST_ENTRIES))
    failed = sum(s.positions_of(part).failed for part in parts)
    return {**states[0], "source": source, "progress": {"batches": 0, "below": 0, "above": "", "failed": failed}}


def _between(states: list[s.State]) -> s.State:
    """Merges states between two epochs. Raises ValueError if any rank has saved streams, or the ranks' samplers have
    different states."""
    source = {**states[0]["source"], "rank": None}
    if source.get("streams") is not None or any(state["source"].get("streams") is not None for state in states):
        raise ValueError("merge_state_dicts(): with an iterable data set, every rank resumes from its own state")
    if not _all_alike([state["source"].get("state") for state in states]):
        raise ValueError("merge_state_dicts(): the ranks' samplers have other states; every rank resumes from its own")
    return {**states[0], "source": source}


def _all_alike(values: Sequence[Value]) -> bool:
    return all(s.alike(each, values[0]) for each in values)


def _share(state: s.State) -> Mapping[str, JSON]:
    """Returns which share of the order a state is of. Raises ValueError if it cannot be merged with others."""
    source = state["source"]
    deals = state["kind"] == "iterable" or source.get("way") == REPLAY
    if not deals or source.get("rank") is None or _is_merged(source["rank"]):
        raise ValueError(
            "merge_state_dicts() can share out again only what torch's DistributedSampler dealt out, on a map-style "
            "data set, or a minato_gpu.ShardedDataset; with any other sampler or iterable data set, every rank resumes "
            "from its own state"
        )
    share = s.mapping(source, "rank")
    s.number(share, "replicas", 1, _MOST_RANKS)
    s.number(share, "rank", 0, share["replicas"] - 1)
    return share


def _is_merged(share: JSON) -> bool:
    return isinstance(share, Mapping) and share.get("replicas", share) is None


# --- loading --------------------------------------------------------------------------------------------------


def for_rank(state: s.State, sampling: Sampling) -> s.State:
    """Returns this rank's share of a merged state; any other state as it is.

    Raises ValueError for another rank's in the middle of an epoch. Another rank's between two epochs is taken, without
    the state of torch's global generator.
    """
    mine, source = rank_of(sampling), state["source"]
    saved = source.get("rank")
    if _is_merged(saved):
        return _dealt_anew(state, mine, sampling)
    if not isinstance(saved, Mapping) or mine is None:
        return state
    if _said(saved) != _said(mine):
        if not state["begun"]:
            return {**state, "global": None}
        advice = "every rank resumes from its own state, with as many ranks"
        if "seed" in mine or sampling.iterable:
            advice = "merge the states of all ranks with merge_state_dicts() to resume with other ranks"
        raise ValueError(
            f"the state is one of rank {_said(saved)}, and this loader's "
            f"{'data set' if sampling.iterable else 'sampler'} is rank {_said(mine)}; {advice}"
        )
    if state["begun"]:
        _match(saved, mine, mine)
    return state


def _dealt_anew(state: s.State, mine: s.State | None, sampling: Sampling) -> s.State:
    """Returns this rank's share of a merged state, in the middle of an epoch."""
    source = {**state["source"], "rank": mine}
    if state["kind"] == "iterable":
        return {**state, "source": {**source, **_streams_of(state["source"], mine, sampling)}}
    if mine is None or type(sampling.inner) is not DistributedSampler:
        raise ValueError("a merged state needs torch's DistributedSampler, which shares out what is left")
    _match(state["source"]["rank"], mine, ("shuffle", "seed"))
    progress = s.mapping(state, "progress")
    failed, rest = divmod(s.positions_of(progress).failed, mine["replicas"])
    return {**state, "source": source, "progress": {**progress, "failed": failed + (mine["rank"] < rest)}}


def _streams_of(source: Mapping[str, JSON], mine: s.State | None, sampling: Sampling) -> s.State:
    """Returns the streams of this rank as plain data; for another number of ranks than were saved a single one, which
    stands for its share of what all had left, and which its workers share out.

    Raises ValueError if no rank is known, or the data set does not share out its states.
    """
    if mine is None or not sampling.iterable:
        raise ValueError("a merged state of an iterable data set needs one that tells its rank: a ShardedDataset")
    ranks = [s.mapping({"ranks": part}, "ranks") for part in s.sequence(source, "ranks")]
    if len(ranks) == mine["replicas"]:
        return dict(ranks[mine["rank"]])
    every = [place for part in ranks for place in places_of(part, sampling.stream)]
    shares = shared_out(every, sampling.stream, mine["replicas"], "to be shared out among {} ranks")
    return {"turn": 0, "streams": plain_places([shares[mine["rank"]]])}


def _match(saved: Mapping[str, JSON], mine: Mapping[str, JSON], names: Iterable[str]) -> None:
    for name in names:
        if not s.alike(saved.get(name), mine[name]):
            was = f"{name}={s.quoted(saved.get(name))}"
            raise ValueError(f"the state was saved with {was}, this sampler has {mine[name]!r}")


def _said(share: Mapping[str, JSON]) -> str:
    return s.quoted(share.get("rank")) + " of " + s.quoted(share.get("replicas"))


def gone_of(source: Mapping[str, JSON], sampling: Sampling) -> s.State | None:
    """Returns what of the whole order was delivered before it was dealt out to these ranks; None if it was dealt out
    once.

    Delivered are all entries below the number ``below``, and of those that follow each whose bit is set in ``above``
    (base64). Raises ValueError if that is damaged, or the sampler is no DistributedSampler.
    """
    if source.get("gone") is None:
        return None
    if type(sampling.inner) is not DistributedSampler:
        raise ValueError(
            "state: 'gone' tells of an epoch that torch's DistributedSampler shared out, and this loader's sampler "
            f"is a {type(sampling.inner).__name__}"
        )
    gone = s.mapping(source, "gone")
    return {"below": s.number(gone, "below"), "above": packed(s.unpacked(gone, "above"))}


def dealt(sampler: DistributedSampler[Value], gone: Mapping[str, JSON]) -> list[Key]:
    """Returns this rank's share of what is left of the whole order of all ranks, in that order."""
    whole: DistributedSampler[Value] = DistributedSampler(
        sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=sampler.drop_last
    )
    whole.set_epoch(sampler.epoch)
    order = list(whole)
    left = np.flatnonzero(~_mask(gone, len(order)))
    mine = share(left, sampler.rank, sampler.num_replicas, drop_last=sampler.drop_last)
    return [order[entry] for entry in mine.tolist()]


# --- entries of the whole order ---------------------------------------------------------------------------------


def _with_shares(gone: Mapping[str, JSON] | None, parts: Sequence[Mapping[str, JSON]], count: int) -> s.State:
    """Adds what ranks have delivered of their shares to what was gone of the whole order, of ``count`` entries."""
    mask = np.zeros(count, np.bool_) if gone is None else _mask(gone, count)
    left = np.flatnonzero(~mask)
    for rank, part in enumerate(parts):
        theirs = left[rank :: len(parts)]
        mask[theirs[_mask(part, len(theirs))]] = True
    below = count if mask.all() else int(np.argmin(mask))
    return {"below": below, "above": packed(np.packbits(mask[below:], bitorder="little").tobytes().rstrip(b"\0"))}


def _mask(delivered: Mapping[str, JSON], count: int) -> NDArray[np.bool_]:
    """Returns for each of ``count`` positions whether it was delivered: ``below`` a line, or its bit ``above`` it is
    set."""
    mask, below = np.zeros(count, np.bool_), s.number(delivered, "below")
    above = np.frombuffer(s.unpacked(delivered, "above"), np.uint8)
    mask[:below] = True
    mask[below : below + 8 * len(above)] = np.unpackbits(above, bitorder="little")[: max(0, count - below)]
    return mask
