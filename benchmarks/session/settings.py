"""How large a session is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from minato_gpu.threads import usable_cores


@dataclass(frozen=True)
class Settings:
    """``device``: "cuda" or "cpu" (the stand-ins). ``quick``: toy size. ``folder``: class folders of photographs.

    A run of a loader takes ``resident_s`` for steps on resident batches (where there are steps), then ``warm_s`` from
    its first batch on, until it has settled, and ``timed_s`` that count, however slow it is; a try of a setting is
    timed for ``tried_s``. Where a device lane is still opening after ``warm_s``, the run waits until it is at work, for
    at most ``opening_s`` from its first batch on. ``settle_s``: the pause between two runs. ``cores``: how many of this
    machine's a run may use; 0: all.
    """

    device: str
    quick: bool
    folder: Path
    workers: int
    repetitions: int
    photographs: int
    batch: int
    size: int
    classes: int
    resident_s: float
    warm_s: float
    opening_s: float
    timed_s: float
    tried_s: float
    settle_s: float
    cores: int = 0

    @classmethod
    def usual(cls, device: str, folder: Path, *, quick: bool) -> Settings:
        """The size of a real run, or of a toy."""
        if quick:
            return cls(
                device,
                quick,
                folder,
                workers=1,
                repetitions=1,
                photographs=0,
                batch=4,
                size=32,
                classes=16,
                resident_s=0.02,
                warm_s=0.02,
                opening_s=0.0,
                timed_s=0.04,
                tried_s=0.02,
                settle_s=0.0,
            )
        return cls(
            device,
            quick,
            folder,
            workers=max(1, usable_cores() - 2),
            repetitions=5,
            photographs=2000,
            batch=256,
            size=224,
            classes=1000,
            resident_s=1.0,
            warm_s=3.0,
            opening_s=15.0,  # importing DALI and building graphs took 4 to 7 s on an H200
            timed_s=3.0,
            tried_s=2.0,
            settle_s=0.3,
        )

    def on_cores(self, count: int) -> Settings:
        """The same on so many cores."""
        return replace(self, cores=count, workers=max(1, count - 2))

    def told(self) -> dict[str, Any]:
        """All of them but the path, which is this machine's own affair."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}
