"""A question in numbers: what of a measured rank would be otherwise, and what came of it where it was really run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from minato_gpu.lab.analysis.profile import LoaderKind, Profile


class CannotTry(Exception):
    """A setting that cannot be run here, and why."""


@dataclass(frozen=True)
class Setting:
    """What is changed; None, or 1 of a factor, leaves it as it was measured.

    ``cache``: share of the set's bytes that a cache in memory may keep; ``policy``: of that cache (empty: as the loader
    chooses). ``step_times``: the step takes so many times as long. ``ranks``: that share out the data set, each with
    the workers that were measured, and the storage and the cores between them.
    """

    loader: LoaderKind | None = None
    workers: int | None = None
    cores: int | None = None
    batch_size: int | None = None
    cache: float | None = None
    policy: str = ""
    bytes_per_s: float | None = None
    latency_s: float | None = None
    step_times: float = 1.0
    step_s: float | None = None
    ranks: int | None = None

    def applied(self, profile: Profile) -> Profile:
        """What the measured rank would be.

        A step that has a batch of another size takes as much longer as the batch is larger: so does its transfer.
        Raises ValueError where the profile knows nothing of what is to change.
        """
        values = {
            name: value
            for name in ("loader", "workers", "cores", "batch_size")
            if (value := getattr(self, name)) is not None
        }
        larger = (self.batch_size or profile.batch_size) / profile.batch_size
        steps = profile.step_s if self.step_s is None else (self.step_s,)
        values |= {
            "step_s": tuple(each * self.step_times * larger for each in steps),
            "transfer_s": profile.transfer_s * larger,
            "collate_s": profile.collate_s * larger,
        }
        if self.loader is not None and self.loader != profile.loader:
            values |= {"overlap": False}  # a script would have to say how many epochs there are
        found = replace(profile, **values)
        found = self._shared_out(found)
        if self.bytes_per_s is None and self.latency_s is None:
            return found
        if found.storage is None:
            raise ValueError("no read was seen when this profile was measured: what storage gives cannot be changed")
        storage = found.storage
        rate = storage.bytes_per_s if self.bytes_per_s is None else self.bytes_per_s
        latency = storage.latency_s if self.latency_s is None else self.latency_s
        return replace(found, storage=replace(storage, bytes_per_s=rate, latency_s=latency))

    def _shared_out(self, profile: Profile) -> Profile:
        if self.ranks is None or self.ranks == profile.ranks:
            return profile
        whole = profile.samples * profile.ranks
        storage = profile.storage
        if storage is not None:
            storage = replace(storage, bytes_per_s=storage.bytes_per_s * profile.ranks / self.ranks)
        cores = profile.cores
        if self.cores is None:
            cores = max(1, cores * profile.ranks // self.ranks)
        return replace(
            profile,
            samples=-(-whole // self.ranks),
            ranks=self.ranks,
            shards=max(1, profile.shards * self.ranks // profile.ranks),
            cores=cores,
            storage=storage,
            overlap=False,  # a sampler that shares out tells no epoch ahead
        )


@dataclass(frozen=True)
class Trial:
    """``epoch_s``: seconds of an epoch in this setting, each time that it was tried; ``why_not``: where it was not."""

    setting: Setting
    epoch_s: tuple[float, ...] = ()
    why_not: str = ""

    @property
    def median_s(self) -> float:
        """Of the times it was tried."""
        return median(self.epoch_s)

    @property
    def spread_s(self) -> float:
        """Between the slowest and the fastest of them."""
        return max(self.epoch_s) - min(self.epoch_s)
