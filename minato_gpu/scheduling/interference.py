"""Doing no harm: what device work costs the training step, and whether it is needed at all. Pure; it hears, it decides.

While the loader prepares samples on the device that trains, steps take longer. By how much is measured while running:
the slope of the least-squares line through (seconds of device-lane work since the batch before, seconds of the step),
with exponential forgetting. A second of device work then counts as 1 + slope seconds when lanes are compared.

And as long as the CPU lane alone prepares batches faster than the consumer takes them, the device is *spared*: it gets
nothing, so it costs nothing. A consumer that has to wait all the same ends that for a while.

With several devices a step is that of a round, one batch for each: a consumer takes those together, and between them
hardly a moment passes. The work in it is that of one device, on average. All counts below are of steps.

Simulated on the design's hybrid costs (16,000 samples, window 256, a second of device work adding a second of step):
with a step half as long again as the CPU lane needs, the epoch takes 0.70 of what it takes without this; with one of
0.6 of it, where the device must help, 0.88. AFTER_WAIT from 8 to 32 hardly matters.

Rejected: sparing the device whenever enough batches are ready. They are ready because the device helped to make them,
so it would be switched off and on by turns.
"""

from __future__ import annotations

ENOUGH, SHORT = 0.85, 0.95  # CPU seconds of a batch over the step's: below, the device is spared; above, no longer
AFTER_WAIT = 8  # steps for which it is not, once the consumer has waited
LEARNED = 8  # steps after which the mean is one
_FORGET = 1 / 64
_STEADY = 0.02  # device work that varies by less than this share of a step says nothing about it
_OUTLIER = 4.0  # a pause that is longer than this many steps is none
MOST = 4.0


class DeviceInterference:
    """The step of one consumer. ``slope``: seconds of step for a second of device work; ``spare``: leave it alone.

    ``devices``: batches of a step.
    """

    def __init__(self, enabled: bool, devices: int = 1) -> None:
        self.slope = 0.0
        self.spare = False
        self.step_s = 0.0
        self._enabled = enabled
        self._devices = devices
        self._round: list[float] = []  # seconds before each batch of the step that is not over
        self._count = 0
        self._work = 0.0
        self._work_s = 0.0  # mean per step
        self._work_var = self._covariance = 0.0
        self._patience = 0

    @property
    def price(self) -> float:
        """What a second of device work counts."""
        return 1.0 + self.slope

    def worked(self, seconds: float) -> None:
        """The device lane has worked so long."""
        self._work += seconds

    def waited(self) -> None:
        """The consumer found no batch."""
        self._patience = AFTER_WAIT
        self.spare = False

    def stepped(self, step_s: float, cpu_batch_s: float) -> bool:
        """The consumer was away for ``step_s`` seconds (0: unknown) and takes its next batch, for which the CPU lane
        alone needs ``cpu_batch_s``. Returns whether the device should be treated otherwise than before."""
        self._round.append(step_s)
        if len(self._round) < self._devices:
            return False
        step_s, self._round = sum(self._round) if min(self._round) > 0 else 0.0, []
        before = (self.spare, self.slope)
        work, self._work = self._work / self._devices, 0.0
        if not self._enabled or step_s <= 0:
            return False
        self._learn(min(step_s, _OUTLIER * self.step_s) if self._count >= LEARNED else step_s, work)
        self._patience = max(0, self._patience - 1)
        share = cpu_batch_s * self._devices / self.step_s
        limit = SHORT if self.spare else ENOUGH
        self.spare = not self._patience and self._count >= LEARNED and 0 < share <= limit
        return before[0] != self.spare or abs(before[1] - self.slope) > 0.05 * (1 + before[1])

    def _learn(self, step_s: float, work: float) -> None:
        self._count += 1
        weight = max(1 / self._count, _FORGET)
        from_mean = work - self._work_s
        self._work_s += weight * from_mean
        of_step = step_s - self.step_s
        self.step_s += weight * of_step
        self._work_var += weight * ((1 - weight) * from_mean**2 - self._work_var)
        self._covariance += weight * ((1 - weight) * from_mean * of_step - self._covariance)
        noise = (_STEADY * self.step_s) ** 2
        self.slope = min(max(self._covariance, 0.0) / (self._work_var + noise), MOST) if self._count >= LEARNED else 0.0
