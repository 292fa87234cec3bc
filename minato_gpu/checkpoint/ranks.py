"""Merges the states of all ranks of a distributed job, and splits a merged state for any number of ranks.

``DistributedSampler`` deals one order out to R ranks: position p of rank r is entry p * R + r of the whole. A merged
state holds the states of all ranks. The same number of ranks goes on from its own each. After a change of their number
the union of what was delivered is removed from the whole order (it is *gone*), and the rest is dealt out anew, and so
on for every further change. Entries that only filled up the last round are not kept: they are repetitions, and ranks
fill up their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from minato_gpu.caching import orders
from minato_gpu.checkpoint import state as s
from minato_gpu.checkpoint.streams import places_of, plain_places, shared_out
from minato_gpu.samples import JSON, Key, Value
from minato_gpu.sampling.order import REPLAY
from minato_gpu.sampling.packing import packed
from minato_gpu.sampling.samplers import Sampling, attribute_of
from minato_gpu.util.numbers import is_whole

_SEEDS = "seed", "workers_seed", "workers_epoch", "generators"
_OF_STREAMS = "turn", "streams", "shared_seed", "global_at_start"
_SHARES = ("num_replicas", "rank"), ("num_processes", "process_index")


def rank_of(sampling: Sampling) -> s.State | None:
    """Returns which share of the order a sampler has; None if it has all, as far as is known.

    All is known of torch's DistributedSampler. Others have its attributes (``num_replicas`` and ``rank``), or those of
    Accelerate's batch samplers, or contain a sampler that has them; or an iterable data set says it.
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


@s.within_depth()
def merge_state_dicts(states: Iterable[Mapping[str, JSON]]) -> dict[str, JSON]:
    """Returns one state from those of all ranks, saved at the same step; every rank of the next job loads it.

    Its number of ranks may be another, where all ranks had the same base seed (``torch.manual_seed``, or equal
    ``generator``): then samples keep their content. Needs torch's ``DistributedSampler``, on a map-style data set, or a
    ``ShardedDataset``. What was delivered counts for all ranks together. Each rank goes on with its own count of
    failures (``max_failures``); another number of ranks shares out the sum of all, and has torch's global generator set
    where it stood alike on all.

    Args:
        states: what ``state_dict`` of each rank's loader returned, in any order.

    Raises:
        ValueError: the states do not belong together, or a rank is missing.
    """
    all_ = [s.check(state) for state in states]
    if not all_:
        raise ValueError("merge_state_dicts() needs the states of all ranks, got none")
    first = all_[0]
    for other in all_[1:]:
        for name in ("begun", "epoch", "kind"):
            if other[name] != first[name]:
                raise ValueError(
                    f"merge_state_dicts(): the states differ in {name!r} ({first[name]!r} and {other[name]!r}); all "
                    "ranks must be saved at the same step"
                )
    if first["kind"] == "merged":  # loaded, and saved before the next iter()
        if _all_alike(all_):
            return first
        raise ValueError("merge_state_dicts(): these are merged already, and not alike; load one of them on all ranks")
    rank = first["source"].get("rank")
    alone = first["kind"] == "map" and s.alike(rank, {"replicas": 1, "rank": 0})  # by no DistributedSampler
    undealt = rank is None or alone
    if len(all_) == 1 and (undealt or not first["begun"]):
        return first
    by_rank = _begun(all_) if first["begun"] else _between(all_)
    return {name: first[name] for name in ("format", "version", "epoch", "begun")} | {
        "kind": "merged",
        "ranks": by_rank,
    }


def _begun(states: list[s.State]) -> list[s.State]:
    """Returns the states in the order of their ranks.

    Raises ValueError if some are missing, or their samplers differ.
    """
    shares = [_share(state) for state in states]
    replicas, ranks = shares[0]["replicas"], [share["rank"] for share in shares]
    if sorted(ranks) != list(range(replicas)):
        raise ValueError(
            f"merge_state_dicts() needs one state of each of the {replicas} ranks, got ranks {sorted(ranks)}"
        )
    differs = ("rank", "witness", *_OF_STREAMS)
    source = {name: value for name, value in states[0]["source"].items() if name not in differs}
    for state, share in zip(states, shares, strict=True):
        same = s.alike({name: state["source"].get(name) for name in source}, source)
        if not same or not s.alike({**share, "rank": 0}, {**shares[0], "rank": 0}):
            raise ValueError("merge_state_dicts(): the ranks' samplers differ in more than their rank")
    return [states[ranks.index(rank)] for rank in range(replicas)]


def _between(states: list[s.State]) -> list[s.State]:
    """Returns states between two epochs in the order of their ranks, if these are known.

    Raises ValueError if one rank's own state, of its sampler or its streams, differs from the others'.
    """
    if any(state["source"].get("streams") is not None for state in states):
        raise ValueError("merge_state_dicts(): with an iterable data set, every rank resumes from its own state")
    if not _all_alike([state["source"].get("state") for state in states]):
        raise ValueError("merge_state_dicts(): the ranks' samplers have other states; every rank resumes from its own")
    shares = [state["source"].get("rank") for state in states]
    ranks = [share.get("rank") if isinstance(share, Mapping) else None for share in shares]
    if sorted(map(repr, ranks)) == sorted(map(repr, range(len(states)))):
        return [states[ranks.index(rank)] for rank in range(len(states))]
    if not _all_alike([_seeds(state) for state in states]):
        raise ValueError(
            "merge_state_dicts(): the ranks have other generators or seeds, and their samplers do not tell their "
            "ranks; every rank resumes from its own state"
        )
    return states


def _seeds(state: s.State) -> s.State:
    return {name: state[name] for name in _SEEDS}


def _all_alike(values: Sequence[Value]) -> bool:
    return all(s.alike(each, values[0]) for each in values)


def _share(state: s.State) -> Mapping[str, JSON]:
    source = state["source"]
    deals = state["kind"] == "iterable" or (state["kind"] == "map" and source.get("way") == REPLAY)
    if not deals or source.get("rank") is None:
        raise ValueError(
            "merge_state_dicts() can share out again only what torch's DistributedSampler dealt out, on a map-style "
            "data set, or a minato_gpu.ShardedDataset; with any other sampler or iterable data set, every rank resumes "
            "from its own state"
        )
    share = s.mapping(source, "rank")
    s.number(share, "replicas", 1, 1 << 20)
    s.number(share, "rank", 0, share["replicas"] - 1)
    return share


def for_rank(state: s.State, sampling: Sampling) -> s.State:
    """Returns what a (merged) state means for this loader's rank. Raises ValueError if it belongs to another rank."""
    mine = rank_of(sampling)
    if state["kind"] == "merged":
        ranks = [s.check(s.mapping({"ranks": part}, "ranks")) for part in s.sequence(state, "ranks")]
        alike = ("map",) if not ranks or ranks[0]["kind"] == "map" else ("iterable",)
        if not ranks or not all(part["kind"] in alike and part["begun"] == state["begun"] for part in ranks):
            raise ValueError("state: 'ranks' must hold the states of all ranks at one step")
        own = ranks[mine["rank"]] if mine is not None and len(ranks) == mine["replicas"] else None
        if own is None or mine is None or _said(own) != _said_of(mine):
            return _dealt_anew(ranks, mine, sampling)
        same = not state["begun"] or s.alike(own["source"]["rank"].get("drop_last"), mine.get("drop_last"))
        return for_rank(own, sampling) if same else _dealt_anew(ranks, mine, sampling)
    saved = state["source"].get("rank")
    if saved is not None and mine is not None and _said(state) != _said_of(mine):
        if not state["begun"]:
            return {**state, "global": None}
        advice = "every rank resumes from its own state, with as many ranks"
        if "seed" in mine or sampling.iterable:
            advice = "merge the states of all ranks with merge_state_dicts() to resume with other ranks"
        raise ValueError(
            f"the state is one of rank {_said(state)}, and this loader's "
            f"{'data set' if sampling.iterable else 'sampler'} is rank {_said_of(mine)}; {advice}"
        )
    if isinstance(saved, Mapping) and mine is not None and state["begun"]:
        _match(saved, mine, mine)
    return state


def _dealt_anew(ranks: list[s.State], mine: s.State | None, sampling: Sampling) -> s.State:
    """Returns what the states of ranks mean for another number of ranks.

    Raises ValueError if they seeded differently.
    """
    first = ranks[0]
    if not _all_alike([_seeds(state) for state in ranks]):
        raise ValueError(
            f"the state was merged from {len(ranks)} ranks that had other seeds or generators, so that another number "
            "of ranks cannot go on with the same samples. Give all ranks the same seed (torch.manual_seed(), or a "
            "generator) before their first iter(), or resume with as many ranks"
        )
    if not _all_alike([state.get("global") for state in ranks]):
        first = {**first, "global": None}
    source = {**first["source"], "rank": mine}
    if not first["begun"]:
        return {**first, "source": source}
    if first["kind"] == "iterable":
        return {**first, "source": {**source, **_streams_anew(ranks, mine, sampling)}}
    if mine is None or type(sampling.inner) is not DistributedSampler:
        raise ValueError("a merged state needs torch's DistributedSampler, which shares out what is left")
    shares = [_share(state) for state in ranks]
    if any(share["rank"] != rank or share["replicas"] != len(ranks) for rank, share in enumerate(shares)):
        raise ValueError(f"state: 'ranks' does not hold one state of each of {len(ranks)} ranks")
    _match(shares[0], mine, ("shuffle", "seed"))
    whole: Value = sampling.inner.dataset
    parts = [s.mapping(state, "progress") for state in ranks]
    failed, rest = divmod(sum(s.positions_of(part).failed for part in parts), mine["replicas"])
    source.update(witness=None, gone=_with_shares(gone_of(source, sampling), parts, len(whole)))
    progress = {"batches": 0, "below": 0, "above": "", "failed": failed + (mine["rank"] < rest)}
    return {**first, "source": source, "progress": progress}


def _streams_anew(ranks: list[s.State], mine: s.State | None, sampling: Sampling) -> s.State:
    """Returns what is left of the streams of all ranks, shared out among another number of ranks.

    It is one stream, which this rank's workers share. Raises ValueError if no rank is known, or the data set does not
    share out its states.
    """
    if mine is None or not sampling.iterable:
        raise ValueError("a merged state of an iterable data set needs one that tells its rank: a ShardedDataset")
    every = [place for state in ranks for place in places_of(state["source"], sampling.stream)]
    shares = shared_out(every, sampling.stream, mine["replicas"], "to be shared out among {} ranks")
    return {"turn": 0, "streams": plain_places([shares[mine["rank"]]])}


def _match(saved: Mapping[str, JSON], mine: Mapping[str, JSON], names: Iterable[str]) -> None:
    for name in names:
        if not s.alike(saved.get(name), mine[name]):
            was = f"{name}={s.quoted(saved.get(name))}"
            raise ValueError(f"the state was saved with {was}, this sampler has {mine[name]!r}")


def gone_of(source: Mapping[str, JSON], sampling: Sampling) -> s.State | None:
    """Returns what of the whole order was delivered before it was dealt out to these ranks; None if it was dealt out
    once.

    All entries ``below`` a line, and a bit for each that follows; gaps may have any length. Raises ValueError if that
    is damaged, or no sampler deals it out.
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


def _said(state: s.State) -> str:
    return _said_of(state["source"].get("rank"))


def _said_of(share: JSON) -> str:
    return f"{share.get('rank')} of {share.get('replicas')}" if isinstance(share, Mapping) else f"{s.quoted(share)}"


def dealt(sampler: DistributedSampler[Value], gone: Mapping[str, JSON]) -> list[Key]:
    """Returns this rank's share of what is left of the sampler's order, in that order."""
    whole: DistributedSampler[Value] = DistributedSampler(
        sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=sampler.drop_last
    )
    whole.set_epoch(sampler.epoch)
    order = list(whole)
    left = np.flatnonzero(~_mask(gone, len(order)))
    mine = orders.share(left, sampler.rank, sampler.num_replicas, drop_last=sampler.drop_last)
    return [order[entry] for entry in mine.tolist()]


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
    mask, below = np.zeros(count, np.bool_), delivered["below"]
    above = np.frombuffer(s.unpacked(delivered, "above"), np.uint8)
    mask[:below] = True
    mask[below : below + 8 * len(above)] = np.unpackbits(above, bitorder="little")[: max(0, count - below)]
    return mask
