"""Where an epoch's time goes: parts that add up to it, from differences between phases.

Differential measurement as in DS-Analyzer (Mohan et al., VLDB 2021, section 4): T1, the time of a batch that is there
already; T2, with the loader and all bytes in memory; T3, with no byte in memory. T2 - T1 is what preparation costs the
training loop, T3 - T2 what fetching does. Of T2 - T1 the transfer and the loader's own cost, which are measured by
themselves, are set apart, and of several ranks the time that a step takes longer because others are late.

A difference of two means has an error, from the spread of blocks of batches. One below twice its error is noise: it is
shown as such, and a negative one counts as nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from minato_gpu.lab.analysis.profile import Profile
from minato_gpu.samples import JSON

Name = Literal["compute", "transfer", "loader", "ranks", "preparation", "fetch"]
TITLES: dict[str, str] = {
    "compute": "compute",
    "transfer": "transfer to the device",
    "loader": "the loader's own cost",
    "ranks": "waiting for other ranks",
    "preparation": "preparation stall",
    "fetch": "fetch stall",
}
_TIMES_THE_ERROR = 2.0
_BLOCKS = 10


class EpochPart(NamedTuple):
    """One part of an epoch."""

    name: Name
    seconds: float  # of each batch
    share: float  # of the epoch
    error_s: float  # of the seconds
    is_noise: bool  # above 0, and less than twice its error
    is_known: bool  # else its phase was not measured, and it counts as 0

    @property
    def certain(self) -> float:
        """The share, unless it is noise: then 0."""
        return 0.0 if self.is_noise else self.share


class Breakdown(NamedTuple):
    """The parts of an epoch by name, whose shares add up to 1. ``batch_s``: the whole of each batch."""

    parts: Mapping[str, EpochPart]
    batch_s: float

    @property
    def step_s(self) -> float:
        """Seconds of the step itself for a batch."""
        return self.parts["compute"].seconds

    @property
    def stalls(self) -> list[EpochPart]:
        """The parts in which the step waits for this rank's own data."""
        return [part for part in self.parts.values() if part.name not in ("compute", "ranks")]


class Mean(NamedTuple):
    """A mean, and its standard error."""

    value: float
    error: float


def mean_of(values: Sequence[float], workers: int = 1) -> Mean:
    """Returns mean and error of times that depend on their neighbours: the error comes from means of blocks of
    neighbours.

    Batches come in bursts where several ``workers`` each make one. So a block is of whole rounds of them, if there are
    two rounds. Of a single block the error is the mean itself. Raises ZeroDivisionError without values.
    """
    mean = math.fsum(values) / len(values)
    size = max(1, len(values) // _BLOCKS)
    if len(values) >= 2 * workers > 0:
        size = -(-size // workers) * workers
    means = [math.fsum(values[at : at + size]) / size for at in range(0, len(values) - size + 1, size)]
    if len(means) < 2:
        return Mean(mean, mean)  # a single time says nothing of its error
    variance = math.fsum((each - mean) ** 2 for each in means) / (len(means) - 1)
    return Mean(mean, math.sqrt(variance / len(means)))


def broken_down(profile: Profile) -> Breakdown | None:
    """Returns the parts of this rank's epoch; None where not even T1 and T2 were measured."""
    times = {name: phase.batch_s for name, phase in profile.phases.items() if phase.batch_s}
    if "compute" not in times or "warm" not in times:
        return None
    compute, warm = mean_of(times["compute"]), mean_of(times["warm"], profile.workers)
    cold = mean_of(times["cold"], profile.workers) if "cold" in times else None
    stalls = max(warm.value - compute.value, 0.0)
    transfer = min(profile.transfer_s, stalls)
    loader = min(profile.loader_s, stalls - transfer)
    slower = max(warm.value - profile.phases["warm"].wait_s - compute.value, 0.0)  # a step, beside the loader
    ranks = min(slower, stalls - transfer - loader) if profile.ranks > 1 else 0.0
    of_warm = math.hypot(compute.error, warm.error)
    found: list[tuple[Name, float, float]] = [
        ("compute", compute.value, compute.error),
        ("transfer", transfer, compute.error),
        ("loader", loader, 0.0),
        ("ranks", ranks, of_warm),
        ("preparation", stalls - transfer - loader - ranks, of_warm),
    ]
    if cold is None:
        found.append(("fetch", 0.0, 0.0))
    else:
        fetch = max(cold.value - max(warm.value, compute.value), 0.0)
        found.append(("fetch", fetch, math.hypot(cold.error, warm.error)))
    whole = math.fsum(seconds for _, seconds, _ in found)
    parts: dict[str, EpochPart] = {
        name: EpochPart(
            name,
            seconds,
            seconds / whole if whole else 0.0,
            error,
            0 < seconds < _TIMES_THE_ERROR * error,
            name != "fetch" or cold is not None,
        )
        for name, seconds, error in found
    }
    return Breakdown(parts, whole)


def of_ranks(profiles: Sequence[Profile]) -> list[tuple[Profile, Breakdown]]:
    """Returns the ranks of which the parts are known, with their parts."""
    return [(profile, found) for profile in profiles if (found := broken_down(profile)) is not None]


def part_rows(known: Sequence[tuple[Profile, Breakdown]]) -> list[dict[str, JSON]]:
    """Returns a row for each part of each rank's epoch; of one rank alone without its number. None: not measured."""
    return [
        {
            **({"rank": profile.rank} if profile.ranks > 1 else {}),
            "part": TITLES[part.name],
            "share": part.share if part.is_known else None,
            "ms_a_batch": 1e3 * part.seconds if part.is_known else None,
            "error_ms": 1e3 * part.error_s if part.is_known else None,
            "noise": "within the noise" if part.is_noise else None,
        }
        for profile, found in known
        for part in found.parts.values()
        if part.name != "ranks" or profile.ranks > 1
    ]
