"""How far each sample of a simulated run has come, and what the rest of it takes on either lane."""

from __future__ import annotations

from collections.abc import Iterable

from minato_gpu.lab.simulation.work import Work


class SampleProgress:
    """The true costs of the samples, and the split point that each has come to (none: it has not begun).

    For example, with a cut at stage 2 that takes 3 of a sample's 8 seconds on the CPU, ``seconds`` of the sample is 8,
    or 3 as far as that cut; once it ``came_to`` the cut it is 5, or what the cut's rest takes on a device.
    """

    def __init__(self, work: Work) -> None:
        self._cpu: list[float] = work.cpu.tolist()
        self._device: list[float] = [] if work.device is None else work.device.tolist()
        self._cuts: dict[int, tuple[list[float], list[float]]] = {
            cut.split: (cut.cpu.tolist(), cut.device.tolist()) for cut in work.cuts
        }
        self._split: dict[int, int] = {}

    def came_to(self, serials: Iterable[int], split: int) -> None:
        """These samples wait at ``split`` for another lane."""
        self._split.update(dict.fromkeys(serials, split))

    def seconds(self, serial: int, device: bool, stop: int = -1) -> float:
        """What the rest of the sample takes on a slot, on the CPU as far as split point ``stop`` (-1: to its end)."""
        at = self._split.get(serial)
        if device:
            return self._device[serial] if at is None else self._cuts[at][1][serial]
        upto = self._cpu[serial] if stop < 0 else self._cuts[stop][0][serial]
        return upto if at is None else upto - self._cuts[at][0][serial]

    def next_stop(
        self, serial: int, splits: Iterable[int], begin: float, now: float, end: float
    ) -> tuple[int, float] | None:
        """Of ``splits`` the first that the sample comes to, at ``now`` or later and before ``end``, and when.

        The sample has run on the CPU since ``begin``.
        """
        at = self._split.get(serial, -1)
        if at >= 0:
            begin -= self._cuts[at][0][serial]
        for split in splits:
            time = begin + self._cuts[split][0][serial]
            if split > at and now <= time < end:
                return split, time
        return None
