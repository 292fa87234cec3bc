"""Faults of who observes: harm to the run, and traces that say what was not."""

from __future__ import annotations

from tests.mutations.fault import read

FAULTS = read(r"""
=== engine/engine.py: engine/test_window.py
a wait counts for the cause that it began with
-                    wait.look(perf_counter(), run.scheduler.stall_cause())
+                    pass

=== observe/waits.py: observe/test_waits.py
the sample that came last may be of another batch
-if max(lo, begin) < min(hi, end)]
+]

=== observe/facts.py: observe/test_facts.py
a subscriber that raises ends the run
-            except Exception:
+            except KeyError:

a subscriber that raised is called on
-                self.unsubscribe(subscriber)

=== observe/telemetry.py: observe/test_facts.py
a batch that raised is not told
-            self.facts.publish(f.Failed(self._number, perf_counter(), failed, skipped))
+            pass

=== lanes/leases.py: lanes/test_cpu.py
when costly samples ended is told of the last alone
-known.update(times=times, ends=ends)
+known.update(times=times, ends=ends[-1:])

=== observe/trace.py: observe/test_trace.py
a trace takes more bytes than it may
-        if len(data) > self._room:
+        if not self._room:

a fork writes into its parent's trace
-        if self._file < 0 or os.getpid() != self._process:
+        if self._file < 0:

two traces are written to one file
-            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

an arrow leads to the first of the batches that a chunk was for, and to no other
- = [before] * (begin < lo) + [after] * (hi < end)
+ = [before] * (begin < lo)

what was ready of an epoch that was left is counted as ready for ever
-            self._samples_ready = 0
""")
