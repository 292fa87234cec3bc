"""Faults planted by a reviewer who had not seen the suite."""

from __future__ import annotations

from tests.mutations.fault import read

FAULTS = read(r"""
=== lanes/produce.py: lanes/test_worker.py
a stage that works in place tries again on what its first try left
-            if self._job.retries or self._job.repeats:
+            if self._job.repeats:

=== epoch/delivery.py: contracts/test_padding.py
the batches that were taken to find a good sample are lost
-self._held.popleft() if self._held else self._take()
+self._take()

=== engine/epochs.py: contracts/test_table.py
a batch that was delivered in part has only room for the rest after a resume
-None if left is None else drawn.rows
+None if left is None else sum(hi - lo for lo, hi in left)

=== scheduling/streams.py: contracts/test_table.py
batches of streams come one batch later than max_lateness
-return oldest.first - bisect(self._past_end, oldest.first) <= self.next - self._lateness
+return oldest.first - bisect(self._past_end, oldest.first) < self.next - self._lateness

=== observe/telemetry.py: observe/test_counters.py
an epoch that has ended lasts until its iterator goes
-        self.end = self.end or perf_counter()
+        self.end = perf_counter()

=== window/assembly.py: contracts/test_table.py
a collate_fn that raises loses its batch in silence where samples may be left out
-            if not any(item.collated for item in items):  # else it is the batch itself that failed
+            if items:

=== lanes/spawner.py: contracts/test_deaths.py
a replacement is waited for that was asked of a spawner that is gone
-            found += [(number, RuntimeError(LOST)) for number in self._asked]

=== engine/engine.py: contracts/test_table.py
what connects a loader to its workers stays open when these have ended
                 self.assembly.clear()
-                self._links.close()

=== device/budget.py: device/test_lane.py
samples on a device take the room of the batch that is due
-return limit - self.reserved - sum(held.values())
+return limit - sum(held.values())

=== sources/files.py: sources/test_files.py
a source that ends too early comes in part
-            if count < nbytes:
+            if count < 0:
""")
