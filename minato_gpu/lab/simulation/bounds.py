"""Lower bounds of the time for the same work, which no loader could beat.

*LP bound.* All samples on ``C`` CPU slots and ``D`` devices, divisible and known in advance: the fractional
relaxation of scheduling on unrelated machines (Lawler and Labetoulle, JACM 1978). With two kinds of machine it is a
fractional knapsack: sort by cost ratio, cut where both kinds end together. Also no less than the cheapest way to
prepare the dearest sample. Samples that can be cut have steps instead of one ratio (see ``plans``).

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

from dataclasses import replace

import numpy as np

from minato_gpu.lab.simulation.work import Array, Integers, Work
from minato_gpu.scheduling.plans import END, WHOLE, Plan, hull


def lp_bound(work: Work) -> float:
    """Seconds that the whole work takes at least, from the start, worker start-up included."""
    alone = float(_alone(work).max())
    if _device(work) is None:
        return max(alone, float(_cpu_time(work, work.cpu.sum())))
    return max(alone, _cut(work, *_steps(work, *_plans(work)), divisible=True))


def threshold_limit(work: Work) -> float:
    """Seconds with the best threshold in hindsight on the predicted ratio; the LP bound without a device lane."""
    if _device(work) is None or work.predicted_device is None:
        return lp_bound(work)
    return max(lp_bound(work), _cut(work, *_steps(work, *_plans(_as_told(work))), divisible=False))


def _as_told(work: Work) -> Work:
    """Returns the work with costs as predicted."""
    cuts = tuple(replace(cut, cpu=cut.predicted_cpu, device=cut.predicted_device) for cut in work.cuts)
    return replace(work, cpu=work.predicted_cpu, device=work.predicted_device, cuts=cuts)


def _plans(work: Work) -> tuple[Array, Array]:
    """Seconds of every plan on the CPU and on the device, each of shape (plans, serials): all on the CPU, each split
    point, and all on the device."""
    nothing, cuts = np.zeros(len(work.cpu)), work.cuts
    device = _device(work)
    if device is None:
        return work.cpu[None], nothing[None]
    cpu = [work.cpu, *(cut.cpu for cut in cuts), nothing]
    return np.array(cpu), np.array([nothing, *(cut.device for cut in cuts), device])


def _alone(work: Work) -> Array:
    """Least seconds from the start of each sample to its end."""
    cpu, device = _plans(work)
    least: Array = (cpu + device).min(axis=0)
    return least


def _steps(work: Work, told_cpu: Array, told_device: Array) -> tuple[Array, Array]:
    """Returns what each step between the plans worth having truly saves and costs, in the order of their predicted
    ratios; with two plans these are the samples."""
    cpu, device = _plans(work)
    if not work.cuts:
        order = np.argsort(-told_cpu[0] / told_device[-1], kind="stable")
        return work.cpu[order], device[-1, order]
    rows = {END: 0, WHOLE: len(cpu) - 1, **{cut.split: row for row, cut in enumerate(work.cuts, start=1)}}
    ratios, saved, spent = [], [], []
    for serial, (on_cpu, on_device) in enumerate(zip(told_cpu.T.tolist(), told_device.T.tolist(), strict=True)):
        before = 0
        plans = [Plan(cut.split, on_cpu[row], on_device[row]) for row, cut in enumerate(work.cuts, start=1)]
        for step in hull(on_cpu[0], on_device[-1], plans):
            row = rows[step.plan.split]
            ratios.append(step.ratio)
            saved.append(cpu[before, serial] - cpu[row, serial])
            spent.append(device[row, serial] - device[before, serial])
            before = row
    order = np.argsort(-np.array(ratios), kind="stable")
    return np.array(saved)[order], np.array(spent)[order]


def _device(work: Work) -> Array | None:
    if work.device is None or work.devices == 0:
        return None
    return work.device


def _cpu_time(work: Work, seconds: float | Array) -> Array:
    """Returns when the CPU slots, which start one by one, can have done so many seconds of work."""
    ready = np.array(work.ready_times())
    done = np.concatenate(([0.0], np.cumsum(np.arange(1, work.slots) * np.diff(ready))))  # by the start of each slot
    at = np.searchsorted(done, seconds, side="right") - 1
    times: Array = ready[at] + (np.asarray(seconds) - done[at]) / (at + 1)
    return times


def _cut(work: Work, cpu: Array, device: Array, *, divisible: bool) -> float:
    """Returns the seconds with the best cut of this order: samples before it on devices, the others on CPU slots."""
    on_device = np.concatenate(([0.0], np.cumsum(device))) / work.devices
    on_cpu = _cpu_time(work, np.maximum(cpu.sum() - np.concatenate(([0.0], np.cumsum(cpu))), 0.0))
    best = int(np.argmin(np.maximum(on_device, on_cpu)))
    time = float(max(on_device[best], on_cpu[best]))
    if not divisible:
        return time
    for at in (best - 1, best):  # the sample at the cut may be divided: both lines between its two ends
        if 0 <= at < len(cpu):
            gap, other = on_cpu[at] - on_device[at], on_device[at + 1] - on_cpu[at + 1]
            if gap >= 0 and other >= 0 and gap + other > 0:
                share = gap / (gap + other)
                time = min(time, float(on_device[at] + share * (on_device[at + 1] - on_device[at])))
    return time


def _duals(work: Work) -> tuple[Array, Array]:
    """Prices u of CPU time, shape (duals,), and prefix sums of the priced work, shape (duals, serials + 1).

    With price v = (1 - u C) / D of device time, differences of the sums bound the seconds of an interval.
    """
    device = _device(work)
    if device is None:
        prices, rows = [1.0 / work.slots], [work.cpu / work.slots]
    else:
        ratios = np.quantile(work.cpu / device, np.linspace(0.02, 0.98, 33)).tolist()
        prices = [1.0 / (work.slots + ratio * work.devices) for ratio in ratios]
        on_cpu, on_device = _plans(work)
        rows = [(on_cpu + ratio * on_device).min(axis=0) * u for ratio, u in zip(ratios, prices, strict=True)]
    sums = np.cumsum(np.array(rows), axis=1)
    return np.array(prices), np.concatenate((np.zeros((len(rows), 1)), sums), axis=1)


def held_bound(work: Work, window: int, lateness: int, period: float) -> float:
    """Seconds until the end of the last step (its hand-over plus ``period``), at least, for every policy.

    ``window`` is in samples, ``lateness`` in batches, ``period`` in seconds.
    """
    prices, sums = _duals(work)
    late = np.array(work.ready_times())  # CPU time lost to workers that start one by one
    lost, all_ready = prices * late.sum(), float(late.max())
    alone = _alone(work)
    firsts, batches = work.firsts, work.batches
    starts = np.concatenate(([0], np.minimum(firsts[:-1] + window, firsts[-1])))  # the first serial that had to wait
    needed = _needed(work, lateness)
    releases = np.zeros(batches + 1)  # for what: the start, then T(0), T(1) and so on
    times = np.zeros(batches)
    done = 0
    for k in range(batches):
        time = times[k - 1] + period if k else _first_batch(work, alone, window)
        upto = int(needed[k])
        if upto > done:
            begin = starts[: k + 1]
            inside = begin < upto
            volume = sums[:, upto][:, None] - sums[:, begin[inside]]
            time = max(time, float((releases[: k + 1][inside] + volume.max(axis=0)).max()))
            from_start = float((sums[:, upto] + lost).max())
            if from_start >= all_ready:  # before all are ready, less was lost
                time = max(time, from_start)
            serials = np.arange(done, upto)
            release = releases[np.searchsorted(starts[: k + 1], serials, side="right") - 1]
            time = max(time, float((release + alone[done:upto]).max()))
            done = upto
        times[k] = time
        releases[k + 1] = time
    return float(times[-1]) + period


def _first_batch(work: Work, alone: Array, window: int) -> float:
    """Least time to the first batch: its size of the cheapest samples of the window and first epoch."""
    open_to = min(window, work.epoch_samples[0])
    size = int(work.sizes[0])
    cheapest = np.partition(alone[:open_to], size - 1)[:size]
    return max(float(cheapest.max()), float(cheapest.sum()) / (work.slots + work.devices))


def _needed(work: Work, lateness: int) -> Integers:
    """Returns for each batch the serial before which all must be ready at its hand-over."""
    firsts = work.firsts
    number = np.arange(work.batches)
    by_lateness = firsts[np.maximum(number - lateness + 1, 0)]
    epoch_start = firsts[work.begins]
    last = np.append(np.diff(work.epochs) > 0, True)
    needed: Integers = np.where(last, firsts[1:], np.maximum(by_lateness, epoch_start))
    return needed
