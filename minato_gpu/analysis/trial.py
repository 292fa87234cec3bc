"""What came of a setting that was really run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from minato_gpu.analysis.setting import Setting
from minato_gpu.samples import JSON


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


def trial_from(data: Mapping[str, JSON]) -> Trial:
    """What ``asdict`` gave, perhaps through a file."""
    return Trial(Setting(**data["setting"]), tuple(data["epoch_s"]), data["why_not"])
