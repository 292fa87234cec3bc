"""Faults in what is done about samples that fail and workers that die or hang: counts, blame, replacements."""

from __future__ import annotations

from tests.mutations.fault import read

FAULTS = read(r"""
=== lanes/process_lane.py: lanes/test_processes.py
a hung worker that is being killed is taken to hang once more
-            self._gone.add(worker)  # which takes some time on a busy machine: it has not hung once more

=== engine/deaths.py: engine/test_deaths.py contracts/test_deaths.py
the sample after the one that killed is blamed
-at = (min(claim.started, stop) if reporting else claim.started) - 1
+at = min(claim.started, stop) if reporting else claim.started

a third worker has to die at a sample
-        return self._at[what] >= MOST
+        return self._at[what] > MOST

deaths of an earlier run are counted on
-        self._at.clear()

samples fetched together are blamed together (reverts f8ba8c6)
-            self._singly.update(tickets(together))

workers that end before any work are replaced for ever
-        if self._failed_starts[number] >= STARTS:
+        if False:

=== engine/run.py: engine/test_deaths.py contracts/test_deaths.py
samples that were taken back count as repeated
-log.repeated += max(0, min(claim.started, flight.size) - flight.done)
+log.repeated += max(0, claim.started)

=== faults/watchdog.py: engine/test_faults.py contracts/test_hangs.py
a graph of several samples has the time of one
-if now - since >= self._limit * each.together:
+if now - since >= self._limit:

a job that was stopped for a while has workers that hang (reverts b3ad358)
-            self._resumed = now
+            pass

=== faults/failures.py: contracts/test_errors.py
max_failures allows one fewer
-        if self.count > limit:
+        if self.count >= limit:

=== faults/failures.py: contracts/test_table.py
a batch that on_error refuses loses its other samples without a count (reverts a39b826)
-            self._log.lost(0, delivered)
+            pass

=== epoch/delivery.py: torch_semantics/test_errors.py contracts/test_errors.py contracts/test_table.py
a StopIteration ends the epoch in silence (reverts 6a64706)
-            if isinstance(error, StopIteration):  # a sample's, say, which would end the epoch in silence
+            if False:

=== lanes/leases.py: lanes/test_cpu.py engine/test_engine.py
lease numbers of a run that was given up silence ends of the next (reverts 8cc8f9e)
-if half < 1 or next(iter(self._leases))[0] != next(reversed(self._leases))[0]:
+if half < 1:

=== engine/engine.py: contracts/test_resume_errors.py
a sampler that raised is not asked again (reverts 3d72b01)
-        self.epochs.draw()  # where the sampler raised last time, or it would be waited for in vain

=== util/children.py: contracts/test_limits.py
a child that somebody else has collected runs for ever
-        _mark_ended(process)
+        pass
     elif

=== epoch/session.py: contracts/test_table.py
a forked process takes its parent's workers for its own
-        if self._process != os.getpid():
+        if False:

=== lanes/forking.py: lanes/test_processes.py contracts/test_ends.py
SIGTERM to the whole job ends workers
-    signal.signal(signal.SIGTERM, _leave_to_parent)
+    signal.signal(signal.SIGTERM, signal.SIG_DFL)

=== epoch/inline.py: contracts/test_table.py
without workers an error of a stream takes samples along uncounted (reverts 7806559)
-                self.log.lost(1, stream.size - 1)
+                self.log.lost(1, 0)

=== epoch/padding.py: contracts/test_padding.py
a sample that pads a batch has the draws of its key's first occurrence
-sample_seed(epoch_seed, 0, ticket.index, ticket.occurrence)
+sample_seed(epoch_seed, 0, ticket.index, 0)

=== faults/deferred_error.py: engine/test_faults.py
an error that was kept is raised for every batch
-error, self.kept = self.kept, None
+error = self.kept

=== device/work.py: lanes/test_opening.py
a fragment that cannot be built leaves all samples to the CPU
-            raise BrokenDown(error) from error
+            raise
         with

=== loader.py: contracts/test_ends.py
an iterator keeps its loader, so that one which keeps its iterator is garbage
-iterator = EngineIterator(arguments,
+iterator = EngineIterator(self,
""")
