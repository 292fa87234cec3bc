"""Faults planted by a reviewer who had not seen the suite."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = (
    Fault(
        "a stage that works in place tries again on what its first try left",
        "lanes/produce.py",
        "            if self._job.retries or self._job.repeats:",
        "            if self._job.repeats:",
        ("contracts/test_bad_samples.py",),
    ),
    Fault(
        "the batches that were taken to find a good sample are lost",
        "epoch/delivery.py",
        "self._held.popleft() if self._held else self._take()",
        "self._take()",
        ("contracts/test_padding.py",),
    ),
    Fault(
        "a batch that was delivered in part has only room for the rest after a resume",
        "engine/epochs.py",
        "None if left is None else drawn.rows",
        "None if left is None else sum(hi - lo for lo, hi in left)",
        ("contracts/test_table.py",),
    ),
    Fault(
        "batches of streams come one batch later than max_lateness",
        "scheduling/streams.py",
        "return oldest.first - bisect(self._past_end, oldest.first) <= self.next - self._lateness",
        "return oldest.first - bisect(self._past_end, oldest.first) < self.next - self._lateness",
        ("contracts/test_table.py",),
    ),
    Fault(
        "an epoch that has ended lasts until its iterator goes",
        "observe/telemetry.py",
        "        self.end = self.end or perf_counter()\n",
        "        self.end = perf_counter()\n",
        ("observe/test_counters.py",),
    ),
    Fault(
        "a collate_fn that raises loses its batch in silence where samples may be left out",
        "window/assembly.py",
        "            if not any(item.collated for item in items):  # else it is the batch itself that failed\n",
        "            if items:\n",
        ("contracts/test_table.py",),
    ),
    Fault(
        "a replacement is waited for that was asked of a spawner that is gone",
        "lanes/spawner.py",
        "            found += [(number, RuntimeError(LOST)) for number in self._asked]\n",
        "",
        ("contracts/test_deaths.py",),
    ),
    Fault(
        "what connects a loader to its workers stays open when these have ended",
        "engine/engine.py",
        "                self.assembly.clear()\n                self._links.close()\n",
        "                self.assembly.clear()\n",
        ("contracts/test_table.py",),
    ),
    Fault(
        "samples on a device take the room of the batch that is due",
        "device/budget.py",
        "return limit - self.reserved - sum(held.values())",
        "return limit - sum(held.values())",
        ("device/test_lane.py",),
    ),
    Fault(
        "a source that ends too early comes in part",
        "sources/files.py",
        "            if count < nbytes:\n",
        "            if count < 0:\n",
        ("sources/test_files.py",),
    ),
)
