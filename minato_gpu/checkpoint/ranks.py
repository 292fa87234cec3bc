"""States of all ranks of a distributed job as one, and one state for any number of ranks.

``DistributedSampler`` deals one order out to R ranks: position p of rank r is entry p * R + r of the whole. A merged
state says how far each rank had come. For another number of ranks these are entries of the whole that are *gone*; what
is left is dealt out anew, and so on for every further change. Entries that only filled up the last round are not kept:
they are repetitions, and ranks fill up their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from minato_gpu.caching import orders
from minato_gpu.checkpoint import state as s
from minato_gpu.checkpoint.positions import positions_of
from minato_gpu.number_kinds import is_whole
from minato_gpu.packing import packed
from minato_gpu.samples import JSON, Key, Value
from minato_gpu.sampling.orders import REPLAY
from minato_gpu.sampling.samplers import Sampling, attribute_of

_MOST_RANKS = 1 << 20
_SEEDS = "seed", "workers_seed", "workers_epoch", "generators"
_SHARES = ("num_replicas", "rank"), ("num_processes", "process_index")


def rank_of(sampling: Sampling) -> s.State | None:
    """Which share of the order a sampler has; None where it has all, as far as is known.

    All is known of torch's DistributedSampler; others say their share as its heirs do, or as Accelerate's batch
    samplers do, or have a sampler in them that says it.
    """
    sampler = sampling.inner
    if type(sampler) is not DistributedSampler:
        named = [[attribute_of(part, name) for name in names] for part in sampling.parts for names in _SHARES]
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
    """One state from those of all ranks, saved at the same step; every rank of the next job loads it.

    Its number of ranks may be another. Needs torch's ``DistributedSampler``, on a map-style data set. What was
    delivered counts for all ranks together. Each rank goes on with its own count of failures (``max_failures``);
    another number of ranks shares out the sum of all. The same number of ranks has each its own base seed and global
    generator back. Of another number samples keep their content where the ranks had the same base seed; it has the
    global generator where all ranks' stood alike, else the generators of its processes stay as they are.

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
    rank = first["source"].get("rank")
    undealt = rank is None or s.alike(rank, {"replicas": 1, "rank": 0})  # to one, by no DistributedSampler
    if first["kind"] == "merged" and _all_alike(all_):  # loaded, and saved before the next iter()
        return first
    if len(all_) == 1 and (undealt or not first["begun"]):
        return first
    if not first["begun"]:
        return _between(all_)
    shares = [_share(state) for state in all_]
    replicas = shares[0]["replicas"]
    if sorted(share["rank"] for share in shares) != list(range(replicas)):
        ranks = sorted(share["rank"] for share in shares)
        raise ValueError(f"merge_state_dicts() needs one state of each of the {replicas} ranks, got ranks {ranks}")
    source = {name: value for name, value in first["source"].items() if name not in ("rank", "witness")}
    for state, share in zip(all_, shares, strict=True):
        same = s.alike({name: state["source"].get(name) for name in source}, source)
        if not same or not s.alike({**share, "rank": 0}, {**shares[0], "rank": 0}):
            raise ValueError("merge_state_dicts(): the ranks' samplers differ in more than their rank")
    by_rank = sorted(zip(shares, all_, strict=True), key=lambda pair: int(pair[0]["rank"]))
    parts = [{**s.mapping(state, "progress"), "witness": state["source"].get("witness")} for _, state in by_rank]
    merged = {**by_rank[0][1], "kind": "merged", "source": {**source, "parts": parts, "share": shares[0]}}
    del merged["progress"]
    return {**merged, **_of_each(all_)}


def _between(states: list[s.State]) -> s.State:
    """The same of ranks that are between two epochs. Raises ValueError where one rank's own state, of its sampler or
    its streams, is not the others', too."""
    source = {name: value for name, value in states[0]["source"].items() if name != "rank"}
    if any(state["source"].get("streams") is not None for state in states):
        raise ValueError("merge_state_dicts(): with an iterable data set, every rank resumes from its own state")
    if not _all_alike([state["source"].get("state") for state in states]):
        raise ValueError("merge_state_dicts(): the ranks' samplers have other states; every rank resumes from its own")
    return {**states[0], "source": source, **_of_each(states)}


def _of_each(states: list[s.State]) -> s.State:
    """The global generators and the seeds of all ranks: one for all where they were alike, else rank by rank.

    Where the ranks are not known, global generators that were not alike stay out of it; of seeds, and of the loaders'
    own generators, raises ValueError.
    """
    by_rank = _by_rank(states)
    found = [state.get("global") for state in by_rank or states]
    seeds = [{name: state[name] for name in _SEEDS} for state in by_rank or states]
    out: s.State = {"global": found[0] if _all_alike(found) else None}
    if by_rank and not _all_alike(found):
        out["globals"] = found
    if not _all_alike(seeds):
        if not by_rank:
            raise ValueError(
                "merge_state_dicts(): the ranks have other generators or seeds, and their samplers do not tell their "
                "ranks; every rank resumes from its own state"
            )
        out["seeds"] = seeds
    return out


def _by_rank(states: list[s.State]) -> list[s.State]:
    """In the order of their ranks; none where these are not known."""
    shares = [state["source"].get("rank") for state in states]
    ranks = [share.get("rank") if isinstance(share, Mapping) else None for share in shares]
    if sorted(map(repr, ranks)) != sorted(map(repr, range(len(states)))):
        return []
    return [states[ranks.index(rank)] for rank in range(len(states))]


def _all_alike(values: Sequence[Value]) -> bool:
    return all(s.alike(each, values[0]) for each in values)


def _share(state: s.State) -> Mapping[str, JSON]:
    source = state["source"]
    if state["kind"] != "map" or source.get("way") != REPLAY or source.get("rank") is None:
        raise ValueError(
            "merge_state_dicts() can share out again only what torch's DistributedSampler dealt out, on a map-style "
            "data set; with any other sampler, every rank resumes from its own state"
        )
    share = s.mapping(source, "rank")
    s.number(share, "replicas", 1, _MOST_RANKS)
    s.number(share, "rank", 0, share["replicas"] - 1)
    return share


def for_rank(state: s.State, sampling: Sampling) -> s.State:
    """What a (merged) state means for this loader's rank. Raises ValueError where it is another rank's."""
    mine = rank_of(sampling)
    if state.get("globals") is not None:
        state = {**state, "global": _own(state, "globals", mine)}
    if state.get("seeds") is not None:
        state = _with_seeds(state, _own(state, "seeds", mine))
    if not state["begun"]:
        saved = state["source"].get("rank")
        others = saved is not None and mine is not None and _said(saved) != _said(mine)
        return {**state, "global": None} if others else state
    if state["kind"] != "merged":
        saved = state["source"].get("rank") if state["kind"] == "map" else None
        if saved is not None and mine is not None and _said(saved) != _said(mine):
            advice = "merge the states of all ranks with merge_state_dicts() to resume with other ranks"
            raise ValueError(
                f"the state is one of rank {_said(saved)}, and this loader's sampler is rank {_said(mine)}; "
                f"{advice if 'seed' in mine else 'every rank resumes from its own state, with as many ranks'}"
            )
        if isinstance(saved, Mapping) and mine is not None:
            _match(saved, mine, mine)
        return state
    if mine is None or type(sampling.inner) is not DistributedSampler:
        raise ValueError("a merged state needs torch's DistributedSampler, which shares out what is left")
    source = dict(s.mapping(state, "source"))
    share = s.mapping(source, "share")
    _match(share, mine, ("shuffle", "seed"))
    gone, parts = gone_of(source, sampling), s.sequence(source, "parts")
    if len(parts) != s.number(share, "replicas", 1, _MOST_RANKS):
        raise ValueError(f"state: {len(parts)} parts for {share['replicas']} ranks")
    failed = sum(positions_of(s.mapping({"parts": part}, "parts")).failed for part in parts)
    if share["replicas"] == mine["replicas"] and s.alike(share.get("drop_last"), mine["drop_last"]):
        progress: Mapping[str, JSON] = parts[mine["rank"]]
    else:
        progress = {"batches": 0, "below": 0, "above": "", "failed": _shared_out(failed, mine)}
        whole: Value = sampling.inner.dataset
        source["gone"] = _with_shares(gone, parts, len(whole))
    source.update(witness=progress.get("witness"), rank=mine)
    return {**state, "kind": "map", "source": source, "progress": progress}


def _own(state: s.State, name: str, mine: s.State | None) -> JSON:
    """This rank's of what a merged state holds for each; None where there were more ranks, or fewer."""
    each = s.sequence(state, name)
    return each[mine["rank"]] if mine is not None and len(each) == mine["replicas"] else None


def _with_seeds(state: s.State, own: JSON) -> s.State:
    """The state with these of one rank, if there are any. Raises ValueError where they are damaged."""
    if own is None:
        return state
    seeds = s.mapping({"seeds": own}, "seeds")
    return s.check({**state, **{name: seeds.get(name) for name in _SEEDS}})


def _match(saved: Mapping[str, JSON], mine: Mapping[str, JSON], names: Iterable[str]) -> None:
    for name in names:
        if not s.alike(saved.get(name), mine[name]):
            was = f"{name}={s.quoted(saved.get(name))}"
            raise ValueError(f"the state was saved with {was}, this sampler has {mine[name]!r}")


def _shared_out(count: int, share: Mapping[str, JSON]) -> int:
    """One rank's part of a count of all, so that together they have it once."""
    whole, rest = divmod(count, share["replicas"])
    return int(whole + (share["rank"] < rest))


def gone_of(source: Mapping[str, JSON], sampling: Sampling) -> s.State | None:
    """What of the whole order was delivered before it was dealt out to these ranks: all ``below`` an entry, and a bit
    for each that follows; None where it was dealt out once. It may have gaps of any length, which ranks leave that
    stand apart. Raises ValueError where that is damaged, or no sampler deals it out."""
    if source.get("gone") is None:
        return None
    if type(sampling.inner) is not DistributedSampler:
        raise ValueError(
            "state: 'gone' tells of an epoch that torch's DistributedSampler shared out, and this loader's sampler "
            f"is a {type(sampling.inner).__name__}"
        )
    gone = s.mapping(source, "gone")
    return {"below": s.number(gone, "below"), "above": packed(s.unpacked(gone, "above"))}


def _said(share: JSON) -> str:
    return f"{share.get('rank')} of {share.get('replicas')}" if isinstance(share, Mapping) else f"{s.quoted(share)}"


def dealt(sampler: DistributedSampler[Value], gone: Mapping[str, JSON]) -> list[Key]:
    """This rank's share of what is left of the sampler's order, in that order."""
    whole: DistributedSampler[Value] = DistributedSampler(
        sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=sampler.drop_last
    )
    whole.set_epoch(sampler.epoch)
    order = list(whole)
    left = np.flatnonzero(~_mask(gone, len(order)))
    mine = orders.share(left, sampler.rank, sampler.num_replicas, drop_last=sampler.drop_last)
    return [order[entry] for entry in mine.tolist()]


def _with_shares(gone: Mapping[str, JSON] | None, parts: Sequence[Mapping[str, JSON]], count: int) -> s.State:
    """What is gone of a whole of ``count`` entries with what ranks have had of their shares of the rest."""
    mask = np.zeros(count, np.bool_) if gone is None else _mask(gone, count)
    left = np.flatnonzero(~mask)
    for rank, part in enumerate(parts):
        theirs = left[rank :: len(parts)]
        mask[theirs[_mask(part, len(theirs))]] = True
    below = count if mask.all() else int(np.argmin(mask))
    return {"below": below, "above": packed(np.packbits(mask[below:], bitorder="little").tobytes().rstrip(b"\0"))}


def _mask(delivered: Mapping[str, JSON], count: int) -> NDArray[np.bool_]:
    """Which of so many positions are: those ``below`` a line, and those whose bits ``above`` it are set."""
    mask, below = np.zeros(count, np.bool_), delivered["below"]
    above = np.frombuffer(s.unpacked(delivered, "above"), np.uint8)
    mask[:below] = True
    mask[below : below + 8 * len(above)] = np.unpackbits(above, bitorder="little")[: max(0, count - below)]
    return mask
