"""What no loader could beat: lower bounds of the time for the same work.

*LP bound.* All samples on ``C`` CPU slots and ``D`` devices, divisible and known in advance: the fractional
relaxation of scheduling on unrelated machines (Lawler and Labetoulle, JACM 1978). With two kinds of machine it is a
fractional knapsack: sort by cost ratio, cut where both kinds end together. Also no less than the cheapest way to
prepare the dearest sample.

*Limit.* As the LP bound, but the cut is a threshold on the predicted ratio, chosen in hindsight, and the time is that
of the true costs: what the best threshold can do with these predictions.

*Bound under window, lateness and consumer.* Let T(k) be the hand-over of batch k, P the consumer's period. Then

- T(k) >= T(k-1) + P;
- with lateness L, T(k) comes after the end of every sample of the places up to k - L and of all earlier epochs;
- a serial p is admitted no earlier than the hand-over that brings the delivered samples to p + 1 - window.

So between the admission of serial p and T(k) fits the work of every serial from p on that T(k) must wait for, and
each single one of those samples. The work of an interval is bounded from below by weak duality of the same LP: for
u C + v D = 1, time >= sum of min(u cpu, v device); with a few pairs (u, v) prefix sums give all intervals at once. The
recursion over k takes the largest of these. Whatever composes batches and assigns lanes, however clairvoyant,
satisfies them, so the bound holds for every policy of a row.
"""

from __future__ import annotations

import numpy as np

from minato_gpu.scheduling.work import Array, Work


def lp_bound(work: Work) -> float:
    """Seconds that the whole work takes at least, from the start, worker start-up included."""
    device = _device(work)
    slots = work.slots
    alone = float((work.cpu if device is None else np.minimum(work.cpu, device)).max())
    if device is None:
        return work.startup_s + max(alone, float(work.cpu.sum()) / slots)
    order = np.argsort(-work.cpu / device, kind="stable")
    return work.startup_s + max(alone, _cut(work.cpu[order], device[order], slots, work.devices, divisible=True))


def threshold_limit(work: Work) -> float:
    """Seconds with the best threshold in hindsight on the predicted ratio; the LP bound without a device lane."""
    device = _device(work)
    if device is None or work.predicted_device is None:
        return lp_bound(work)
    order = np.argsort(-work.predicted_cpu / work.predicted_device, kind="stable")
    cut = _cut(work.cpu[order], device[order], work.slots, work.devices, divisible=False)
    return max(lp_bound(work), work.startup_s + cut)


def _device(work: Work) -> Array | None:
    if work.device is None or work.devices == 0:
        return None
    return work.device


def _cut(cpu: Array, device: Array, slots: int, devices: int, divisible: bool) -> float:
    """Time of the best cut of this order: the samples before it on the devices, the others on the CPU slots."""
    on_device = np.concatenate(([0.0], np.cumsum(device))) / devices
    on_cpu = (cpu.sum() - np.concatenate(([0.0], np.cumsum(cpu)))) / slots
    best = int(np.argmin(np.maximum(on_device, on_cpu)))
    time = float(max(on_device[best], on_cpu[best]))
    if not divisible:
        return time
    for at in (best - 1, best):  # the sample at the cut may be divided
        if 0 <= at < len(cpu):
            share = (on_cpu[at] - on_device[at]) / (device[at] / devices + cpu[at] / slots)
            if 0.0 <= share <= 1.0:
                time = min(time, float(on_device[at] + share * device[at] / devices))
    return time


def _interval_work(work: Work) -> Array:
    """Prefix sums of dual weights, shape (duals, serials + 1): differences bound the time of an interval."""
    device = _device(work)
    if device is None:
        return np.concatenate(([0.0], np.cumsum(work.cpu / work.slots)))[None, :]
    ratios = np.quantile(work.cpu / device, np.linspace(0.02, 0.98, 33))
    rows = []
    for ratio in [0.0, *ratios.tolist()]:
        # price of device time against CPU time so that a sample of this ratio is indifferent: u = 1, v = ratio
        scale = work.slots + ratio * work.devices
        rows.append(np.minimum(work.cpu, ratio * device) / scale if ratio else work.cpu * 0.0)
    return np.concatenate((np.zeros((len(rows), 1)), np.cumsum(np.array(rows), axis=1)), axis=1)


def held_bound(work: Work, window: int, lateness: int, period: float) -> float:
    """Seconds until the end of the last step (its hand-over plus ``period``) that hold for every policy."""
    sums = _interval_work(work)
    device = _device(work)
    alone = work.cpu if device is None else np.minimum(work.cpu, device)
    firsts, batches = work.firsts, work.batches
    starts = np.concatenate(([0], np.minimum(firsts[:-1] + window, firsts[-1])))  # the first serial that had to wait
    needed = _needed(work, lateness)
    releases = np.full(batches + 1, work.startup_s)  # for what: start-up, then T(0), T(1) and so on
    times = np.zeros(batches)
    done = 0
    for k in range(batches):
        time = times[k - 1] + period if k else 0.0
        upto = int(needed[k])
        if upto > done:
            begin = starts[: k + 1]
            inside = begin < upto
            volume = (sums[:, upto][:, None] - sums[:, begin[inside]]).max(axis=0)
            time = max(time, float((releases[: k + 1][inside] + volume).max()))
            serials = np.arange(done, upto)
            release = releases[np.searchsorted(starts[: k + 1], serials, side="right") - 1]
            time = max(time, float((release + alone[done:upto]).max()))
            done = upto
        if k == 0:
            time = max(time, work.startup_s + _first_batch(work, alone, window))
        times[k] = time
        releases[k + 1] = max(time, work.startup_s)
    return float(times[-1]) + period


def _first_batch(work: Work, alone: Array, window: int) -> float:
    """Least time to the first batch: its size of the cheapest samples of the window and first epoch."""
    open_to = min(window, work.epoch_samples[0])
    size = int(work.sizes[0])
    cheapest = np.partition(alone[:open_to], size - 1)[:size]
    return max(float(cheapest.max()), float(cheapest.sum()) / (work.slots + work.devices))


def _needed(work: Work, lateness: int) -> Array:
    """For each batch, the serials before which all must be ready at its hand-over."""
    firsts = work.firsts
    number = np.arange(work.batches)
    by_lateness = firsts[np.maximum(number - lateness + 1, 0)]
    starts = np.concatenate(([0], np.cumsum(work.epoch_samples)))
    epoch_start = starts[work.epochs]
    last = np.append(np.diff(work.epochs) > 0, True)
    needed: Array = np.where(last, firsts[1:], np.maximum(by_lateness, epoch_start))
    return needed
