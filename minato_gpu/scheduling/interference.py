"""Estimates how much device-lane work slows the training step, and decides whether to use the device lane at all. Pure.

Samples prepared on the training device make steps longer. The slowdown is measured while running: the slope of the
least-squares line through (seconds of device-lane work since the previous batch, seconds of the step), with exponential
forgetting. When lanes are compared, a second of device work counts as 1 + slope seconds.

While the CPU lane alone prepares batches faster than the consumer takes them, the device is *spared*: it gets no work.
A consumer that has to wait ends the sparing for some steps.

With several devices a step is one round of batches, one for each, since a consumer takes those together. The work in it
is that of one device on average. All counts below are of steps.

Simulated with the design's hybrid costs (16,000 samples, window 256, a second of device work adding a second to the
step): with a step of 1.5 times what the CPU lane needs, the epoch takes 0.70 of the time without this module; with a
step of 0.6 times, where the device must help, 0.88. AFTER_WAIT from 8 to 32 hardly matters.

Rejected: sparing the device whenever enough batches are ready. They are ready because the device helped to make them,
so it would be switched off and on in turn.
"""

from __future__ import annotations

ENOUGH, SHORT = 0.85, 0.95  # CPU seconds of a batch / step seconds: spared from below ENOUGH until above SHORT
AFTER_WAIT = 8  # steps without sparing after the consumer has waited
LEARNED = 8  # steps after which the mean is reliable
_FORGET = 1 / 64  # least weight of a new step
_STEADY = 0.02  # variation of device work, as a share of a step, below which it tells nothing
_OUTLIER = 4.0  # a longer pause, in mean steps, counts as this long
MOST = 4.0  # largest slope


class DeviceInterference:
    """Interference of the device lane with one consumer's training step.

    ``enabled``: False learns nothing; ``price`` stays 1 and the device is not spared. ``devices``: batches of a step.
    """

    def __init__(self, enabled: bool, devices: int = 1) -> None:
        self.slope = 0.0  # seconds of step per second of device work
        self.spare = False  # give the device no work
        self.step_s = 0.0  # mean
        self._enabled = enabled
        self._devices = devices
        self._step_parts: list[float] = []  # seconds before each batch of the current step
        self._count = 0
        self._work = 0.0
        self._work_s = 0.0  # mean per step
        self._work_var = self._covariance = 0.0
        self._steps_unspared = 0

    @property
    def price(self) -> float:
        """Seconds that a second of device work counts as."""
        return 1.0 + self.slope

    def worked(self, seconds: float) -> None:
        """Adds seconds of device-lane work."""
        self._work += seconds

    def waited(self) -> None:
        """Records that the consumer found no batch; the device is not spared for ``AFTER_WAIT`` steps."""
        self._steps_unspared = AFTER_WAIT
        self.spare = False

    def stepped(self, step_s: float, cpu_batch_s: float) -> bool:
        """Records that the consumer was away for ``step_s`` seconds (0: unknown) and takes its next batch, for which
        the CPU lane alone needs ``cpu_batch_s`` (0: unknown). Returns True when ``spare`` or ``price`` have changed
        noticeably."""
        self._step_parts.append(step_s)
        if len(self._step_parts) < self._devices:
            return False
        step_s, self._step_parts = sum(self._step_parts) if min(self._step_parts) > 0 else 0.0, []
        before = (self.spare, self.slope)
        work, self._work = self._work / self._devices, 0.0
        if not self._enabled or step_s <= 0:
            return False
        self._learn(min(step_s, _OUTLIER * self.step_s) if self._count >= LEARNED else step_s, work)
        self._steps_unspared = max(0, self._steps_unspared - 1)
        share = cpu_batch_s * self._devices / self.step_s
        limit = SHORT if self.spare else ENOUGH
        self.spare = not self._steps_unspared and self._count >= LEARNED and 0 < share <= limit
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
