"""The advice, what to change and by how much: one sentence from the profiles of all ranks.

A pure function. It looks at the rank that holds the others up, takes the largest part of its epoch that is not compute
(breakdown.py), and asks what makes that part: too few workers, or cores, a few slow samples, collation, storage's rate
or its latency. A part below 5 % of the epoch, or within the noise, is not worth a change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from minato_gpu.lab.analysis.breakdown import TITLES, Breakdown, EpochPart, of_ranks
from minato_gpu.lab.analysis.preparation import Case, advice
from minato_gpu.lab.analysis.profile import Profile, Storage
from minato_gpu.lab.console import number

WORTH = 0.05  # of the epoch
_SLOWER = 1.1  # times the other ranks' step


class Diagnosis(NamedTuple):
    """What to change, in a sentence."""

    case: Case
    sentence: str
    gain: float  # share of the epoch that the change is worth at most
    rank: int = 0  # that it is about


def verdict(profiles: Sequence[Profile]) -> Diagnosis:
    """Returns the change to make first."""
    known = of_ranks(profiles)
    if not known:
        return Diagnosis("unknown", "Too few batches were seen to say where the time goes.", 0.0)
    if len(known) > 1:
        late = _slow_rank(known)
        if late is not None:
            return late
    profile, found = max(known, key=lambda each: _lost(each[1]))
    return _of_one(profile, found)


def _lost(found: Breakdown) -> float:
    """Returns the seconds of each batch in which the step waits for this rank's own data."""
    return math.fsum(part.seconds for part in found.stalls if not part.is_noise)


def _of_one(profile: Profile, found: Breakdown) -> Diagnosis:
    worst = max(found.stalls, key=lambda part: part.certain)
    if worst.certain < WORTH:
        worst = max(found.stalls, key=lambda part: part.share)
        if worst.share < WORTH:
            return _step_bound(profile, found)
        # rare stalls are noise for long; but where samples are that slow, the costs of samples tell of them as well
        if worst.name != "preparation" or advice(profile, found.step_s).case != "few slow samples":
            return _noise(profile, worst)
    gain = worst.share
    if worst.name == "preparation":
        case, sentence, most = advice(profile, found.step_s)
        gain = min(gain, most)
    else:
        case, sentence = {"transfer": _transfer, "loader": _loader, "fetch": _fetch}[worst.name](profile, found)
    return Diagnosis(case, f"{sentence} That is worth up to {gain:.0%} of the epoch.", gain, profile.rank)


def _step_bound(profile: Profile, found: Breakdown) -> Diagnosis:
    share = found.parts["compute"].share
    best = 1 - share
    unseen = "" if found.parts["fetch"].is_known else " as far as was measured (storage was not)"
    sentence = (
        f"The step takes {share:.0%} of the epoch{unseen}: no loader can save more than {best:.0%}; "
        "make the step faster, or leave things as they are."
    )
    return Diagnosis("step-bound", sentence, best, profile.rank)


def _noise(profile: Profile, worst: EpochPart) -> Diagnosis:
    sentence = (
        f"The largest stall ({TITLES[worst.name]}) is {worst.share:.0%} of the epoch, which is within the noise: "
        "measure longer (--seconds), on a quieter machine."
    )
    return Diagnosis("noise", sentence, 0.0, profile.rank)


# --- ranks ----------------------------------------------------------------------------------------------------------


def _slow_rank(known: Sequence[tuple[Profile, Breakdown]]) -> Diagnosis | None:
    """The rank that the others wait for: its step takes longer, or its data comes later, which they see as compute."""
    (other, others), (profile, found) = (pick(known, key=lambda each: each[1].step_s) for pick in (min, max))
    error = math.hypot(found.parts["compute"].error_s, others.parts["compute"].error_s)
    if found.step_s > _SLOWER * others.step_s and found.step_s - others.step_s > 2 * error:
        gain = 1 - others.step_s / found.step_s
        return Diagnosis(
            "slow rank",
            f"Rank {profile.rank} takes {found.step_s / others.step_s:.1f} times as long for a step as rank "
            f"{other.rank}, and the others wait for it: give it an equal device, or a smaller share. That is worth up "
            f"to {gain:.0%} of the epoch.",
            gain,
            profile.rank,
        )
    return _late_data(known)


def _late_data(known: Sequence[tuple[Profile, Breakdown]]) -> Diagnosis | None:
    lost = sorted(known, key=lambda each: _lost(each[1]))
    (other, others), (profile, found) = lost[-2], lost[-1]
    more = _lost(found) - _lost(others)
    waits = others.parts["ranks"].certain
    if waits < WORTH or found.batch_s <= 0 or more < WORTH * found.batch_s:
        return None
    own = _of_one(profile, found)
    gain = more / found.batch_s
    return Diagnosis(
        "slow rank",
        f"Rank {profile.rank}'s data comes {number(more * 1e3)} ms a batch later than rank {other.rank}'s, which waits "
        f"for it in {waits:.0%} of what looks like its compute. For rank {profile.rank}: {own.sentence}",
        gain,
        profile.rank,
    )


# --- one part each --------------------------------------------------------------------------------------------------


def _transfer(profile: Profile, found: Breakdown) -> tuple[Case, str]:
    first = "" if profile.pin_memory else "pin_memory=True and "
    each, share = profile.transfer_s * 1e3, found.parts["transfer"].share
    return "transfer-bound", (
        f"Moving a batch to the device takes {number(each)} ms, {share:.0%} of the epoch: use {first}"
        "non_blocking=True, or minato_gpu's device='cuda', which moves the next batch during the step."
    )


def _loader(profile: Profile, found: Breakdown) -> tuple[Case, str]:
    step = found.step_s
    larger = min(max(2, math.ceil(profile.loader_s / max(step * WORTH, 1e-9))), 8) if step else 2
    return "loader-bound", (
        f"The loader itself takes {number(profile.loader_s * 1e3)} ms of your training thread for each batch: hand "
        f"over fewer and larger things, a batch size of {larger * profile.batch_size} (now {profile.batch_size}) or "
        "fewer tensors in each batch."
    )


def _fetch(profile: Profile, found: Breakdown) -> tuple[Case, str]:
    storage = profile.storage
    if storage is None or not storage.nbytes:
        return "slow storage", "Samples wait for storage that could not be seen: keep copies with minato_gpu's cache=."
    step = max(found.batch_s - found.parts["fetch"].seconds, 1e-9)
    needed = profile.batch_size / step  # samples a second, as fast as all else allows
    if storage.seconds_per_sample() > storage.nbytes / storage.bytes_per_s:
        return "storage latency", _more_at_once(storage, needed)
    wanted, given = needed * storage.nbytes, storage.bytes_per_s
    missing = max(0.0, 1 - given / wanted)
    return "slow storage", (
        f"Storage gives {number(given / 1e6)} MB/s where {number(wanted / 1e6)} MB/s are needed: keep {missing:.0%} of "
        f"the set in memory or on a local disk (cache={_size(missing * profile.samples * storage.nbytes)!r}), or use "
        f"storage {wanted / given:.1f} times as fast."
    )


def _more_at_once(storage: Storage, needed: float) -> str:
    wanted = round(needed * storage.requests * storage.latency_s, 6)  # where that is whole, it is all that is needed
    at_once = max(math.ceil(wanted), math.ceil(storage.concurrency) + 1)
    return (
        f"Each read waits {number(storage.latency_s * 1e3)} ms for storage, and only {number(storage.concurrency)} are "
        f"under way: read {at_once} at once, by a data set that declares source(key) to minato_gpu.DataLoader, which "
        "reads ahead."
    )


def _size(nbytes: float) -> str:
    return f"{math.ceil(nbytes / 1e9)}GB" if nbytes > 1e9 else f"{math.ceil(nbytes / 1e6)}MB"
