"""Predicts costs in a pipeline with split points: of every part on the CPU, and of every rest on the device.

On the CPU each part between two split points has a model of its own, and a plan costs the sum of its parts. On the
device everything from a split point on runs as one, so each split point has a model of its own for all that follows,
with the time that bringing its input there takes. Until such a rest has been measured, its seconds are guessed: the
share of the whole sample's device seconds that it has on the CPU, and its input's bytes at 5 GB/s. A rest that is
predicted too dear would never be measured, and never be found to be cheap: so every 256th sample is given a predicted
rest of 0 s, at one split point after the other. (A sample that is best prepared on the device from its start still is;
those that the CPU keeps are the ones that matter.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minato_gpu.estimates.estimator import Estimator, Features, Observed
from minato_gpu.lanes.contract import Offers
from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.samples import JSON, Key, TicketId
from minato_gpu.scheduling.costs import CostModel
from minato_gpu.scheduling.history import Array, Keys, plain
from minato_gpu.scheduling.micro_batch_cost import MicroBatchCost
from minato_gpu.scheduling.plans import Plan
from minato_gpu.scheduling.spans import singles

_USUAL_RATE = 5e9  # bytes/s to a device; a guess too high is corrected by the samples that it attracts
_TRY_EVERY = 256  # samples
_UNSENDABLE = 8  # of so many samples to be handed over one may turn out impossible to send


class _Mean:
    """A running mean, ``first`` until a value comes. From the 50th on, each new value weighs 2 %."""

    def __init__(self, first: float) -> None:
        self.value = first
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(1 / self.count, 0.02)


def part_names(pipeline: Pipeline) -> tuple[str, ...]:
    """Returns the cost model's lanes, ``cpu:N`` and ``device:N``: N is the stage that begins the part or rest."""
    begins = (pipeline.host_prefix, *pipeline.cuts)
    return (*(f"cpu:{stage}" for stage in begins), *(f"device:{stage}" for stage in begins))


class CutEstimator(Estimator):
    """Predicts costs of samples of a pipeline with split points (its ``cuts``).

    ``model`` has the lanes ``part_names``. ``devices``: names of device lanes, taken as equally fast.
    """

    def __init__(
        self,
        model: CostModel,
        lanes: tuple[str, ...],
        pipeline: Pipeline,
        devices: Sequence[str],
        micro_batches: MicroBatchCost | None = None,
    ) -> None:
        super().__init__(model, lanes, micro_batches)
        self._begins = (pipeline.host_prefix, *pipeline.cuts)
        # device lanes that have not retired, with what they offer
        self._devices = dict.fromkeys(devices, Offers(frozenset()))
        self._nbytes = {cut: _Mean(float(pipeline.bytes_at(cut) or 0)) for cut in pipeline.cuts}
        self._unsendable = dict.fromkeys(pipeline.cuts, 0)  # samples that could not be sent from there
        self._asked = 0
        self._storing = {cut: _Mean(0.0) for cut in pipeline.cuts}  # seconds to store what is handed over

    def offered(self, lane: str, offers: Offers | None) -> None:
        """Notes at which split points a device lane takes samples; None: the lane has retired."""
        if offers is None:
            self._devices.pop(lane, None)
        elif lane in self._devices:
            self._devices[lane] = offers

    def of_features(
        self, serials: list[TicketId], keys: list[Key], given: list[Features | None]
    ) -> tuple[list[float], list[float], Sequence[Sequence[Plan]]]:
        """Returns predicted seconds of each sample on a slot of the CPU and of a device, waits for a core included
        (nan: not known), and its plans that use both.

        A sample has plans only if both are known, and at split points where every device lane takes samples.
        ``given``: each sample's cost features, or None. They are kept by serial until the sample is measured.
        """
        self._features.update((serial, values) for serial, values in zip(serials, given, strict=True) if values)
        rows, names = self._rows(given), plain(keys)
        upto = np.cumsum([self.model.predict(f"cpu:{stage}", rows, names) for stage in self._begins], axis=0)
        whole = self.model.predict(f"device:{self._begins[0]}", rows, names)
        slow, slow_device = (self._slowdown[lane] for lane in self._lanes)
        plans = [
            (
                cut,
                upto[at] * slow + self._storing[cut].value,
                self._rest(cut, upto, at, whole, rows, names) * slow_device,
            )
            for at, cut in enumerate(self._begins[1:])
            if self._offered(cut) and self._unsendable[cut] * _UNSENDABLE <= self._nbytes[cut].count
        ]
        for number in range(_TRY_EVERY - 1 - self._asked % _TRY_EVERY, len(serials) if plans else 0, _TRY_EVERY):
            plans[(self._asked + number) // _TRY_EVERY % len(plans)][2][number] = 0.0
        self._asked += len(serials)
        cpu, device = upto[-1] * slow, whole * slow_device
        known = ~np.isnan(upto[-1] + whole)
        between = [
            tuple(Plan(cut, float(c[n]), float(d[n]), self._storing[cut].value) for cut, c, d in plans)
            if known[n]
            else ()
            for n in range(len(serials))
        ]
        return cpu.tolist(), device.tolist(), between

    def _offered(self, cut: int) -> bool:
        """Returns whether there is a device lane, and every device lane takes samples at this split point."""
        return bool(self._devices) and all(cut in device.splits for device in self._devices.values())

    def _rest(self, cut: int, upto: Array, at: int, whole: Array, rows: Array, keys: Keys) -> Array:
        """Returns each sample's seconds on the device from split point ``cut`` on; guessed where none was measured.

        ``upto``: CPU seconds up to each split point and to the end, shape (parts, n), with this one's in row ``at``;
        ``whole``: seconds of the whole sample on the device.
        """
        measured = self.model.predict(f"device:{cut}", rows, keys)
        share = 1 - upto[at] / np.maximum(upto[-1], 1e-9)
        guess: Array = whole * share + self._nbytes[cut].value / _USUAL_RATE
        return np.where(np.isnan(measured), guess, measured)

    def measured(self, lane: str, seen: Observed) -> None:
        """Learns what samples cost on a lane of kind ``lane``, "cpu" or "device". Keeps the features of samples that
        another lane continues, and drops the others'.

        Samples whose parts are not known teach nothing: they were prepared before the device lane was open.
        """
        if seen.parts is None or seen.handed is None:
            self.not_measured(singles(seen.serials))
            return
        self._slowed(lane, seen)
        seen = self._as_in_full_micro_batch(lane, seen)
        assert seen.parts is not None and seen.handed is not None
        unknown = (np.nan,) * self.model.features
        found: dict[str, list[tuple[Key, Features, float]]] = {}
        for key, serial, spent, part, nbytes in zip(
            seen.keys, seen.serials, seen.seconds, seen.parts, seen.handed, strict=True
        ):
            row = self._features.get(serial, unknown) if nbytes >= 0 else self._features.pop(serial, unknown)
            if part is None:
                continue
            first, each = part
            share = min(1.0, spent / max(sum(each), 1e-9))  # without the time that it waited for a core
            at, after = self._begins.index(first), max(spent - sum(each), 0.0)
            values = [value * share for value in each]
            if nbytes >= 0:
                cut = self._begins[at + len(each)]
                self._nbytes[cut].add(nbytes)
                self._storing[cut].add(after)
            else:  # the time after its stages went into storing it
                values[-1] += after
            for stage, value in zip(self._begins[at:], values, strict=False):
                found.setdefault(f"{lane}:{stage}", []).append((key, row, value))
        for name, entries in found.items():
            observed, rows, costs = map(list, zip(*entries, strict=True))
            given = np.array(rows, dtype=np.float64)
            if lane != self._lanes[0] and len(costs) > 1:
                costs = self._as_predicted(name, plain(observed), given, costs)
            self.model.observe_many(name, observed, given if self.model.features else None, costs)

    def could_not_send(self, split: int, samples: int) -> None:
        """Counts samples that could not be handed over at ``split``. Once they are more than one for every 8 that were,
        no plan uses that split point."""
        self._unsendable[split] += samples

    def report(self) -> dict[str, JSON]:
        """Returns how well costs were predicted since the epoch began (see ``CostModel.report``), parts weighted by
        their seconds."""
        return dict(self.model.report(by_cost=True))
