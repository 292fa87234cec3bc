"""Faults of who looks from outside: at a run that goes on, and at a script that is analysed."""

from __future__ import annotations

from tests.mutations.fault import read

FAULTS = read(r"""
=== observe/stats_socket.py: observe/test_watching.py
another user's process is told how the loaders stand
-            if is_ours(connection):
+            if connection:

=== observe/shared_service.py: observe/test_watching.py
a forked process holds its parent's socket
-            running.abandon()
+            pass

=== memory/private_folder.py: memory/test_private_folder.py
a folder that lets others in is trusted
-    if not _is_private(found):
+    if not found:

=== observe/counters.py: observe/test_metrics.py
counters of an epoch are lost with it
-        if COUNTERS[key[0]].kind is _EPOCH or begun.get(key, 0.0) < last:
+        if COUNTERS[key[0]].kind is not _EPOCH and begun.get(key, 0.0) < last:

=== lab/analysis/breakdown.py: lab/analysis/test_verdict.py
noise counts as a stall
-0 < seconds < _TIMES_THE_ERROR * error
+0 < seconds < 0 * error

=== lab/analysis/subject.py: lab/analysis/test_watching.py
a loader that the analysis makes is taken for the script's
-        self._own.add(made)

=== lab/analysis/predict.py: lab/analysis/test_whatif.py
what this machine cannot run is said to be verifiable
-value == own or runs_here)
+True)

workers beyond the cores are as fast as others
-max(1.0, workers * self.profile.prepare_cpu_share / self.profile.cores)
+1.0

a step that computes takes no core from the workers
-(step_s + profile.loader_s) * profile.batches
+0.0

an epoch is over before its bytes are read
-np.maximum(read_s, self._computed_s(drawn))
+self._computed_s(drawn)

what batches lose by their order is taken for a slot's own
-slot_s * float(np.clip(np.mean(simulated) / rate, 0.5, 2.0))
+slot_s

=== lab/analysis/trials.py: lab/analysis/test_trials.py
an epoch that was tried in part is taken for the whole
-each * max(0, profile.batches - len(times))
+0.0

=== observe/metrics_server.py: observe/test_metrics.py
metrics are served to everybody
-"127.0.0.1"
+"0.0.0.0"
""")
