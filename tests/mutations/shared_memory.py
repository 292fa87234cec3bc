"""Faults in the order in which processes read and write shared memory: see completions.py and status_board.py."""

from __future__ import annotations

from tests.mutations.fault import read

FAULTS = read(r"""
=== lanes/worker.py: lanes/test_cpu.py
a worker returns what was taken back from it
-if not self._base <= self._words[self._row + LIMIT] <= self._base + progress.done:
+if True:

a worker reads the limit before it says what it starts
-            fence()
-            unfence()
             if base <= words[limit] <= base + done:

a worker rings and has not said that it is through
-        words[self._row + CHUNK] = -1
         self._board.fence()

a worker names its task and has not forgotten how far the last one came
-            words[row + STARTED] = words[row + STAGE] = words[row + BYTES] = 0

=== memory/completions.py: memory/test_completions.py engine/test_engine.py
a block of marks begins with those of its last place
-        self._status[first : first + count] = bytes(count)
         return first

the status byte before the record
-        completions.record(begin, took, end, elapsed, worker, locations)
+        completions.set_ready(begin, stop, in_rows=locations is None)
         self._fence()
         self._unfence()
-        completions.set_ready(begin, stop, in_rows=locations is None)
+        completions.record(begin, took, end, elapsed, worker, locations)

no fence between the record and the status byte
         completions.record(begin, took, end, elapsed, worker, locations)
-        self._fence()
-        self._unfence()
         completions.set_ready(begin, stop, in_rows=locations is None)

no fence between the status byte and the count
         completions.set_ready(begin, stop, in_rows=locations is None)
-        self._fence()
-        self._unfence()

the count before the status byte
+        need = words[AWAITED_NEED]
         completions.set_ready(begin, stop, in_rows=locations is None)
         self._fence()
         self._unfence()
-        need = words[AWAITED_NEED]

no fence between what is awaited and the count
-        self._board.fence()
         return self._completions.ready(begin, end) >= need

what is awaited is exchanged while workers count
-        words[AWAITED_NEED] = 0
         words[AWAITED_BEGIN]

status bytes are stored by a copy, which stores some twice
-        for at in range(end - 1, begin - 1, -1):
-            status[at] = mark
+        status[begin:end] = bytes([mark]) * (end - begin)

a batch that is joined by its worker is told before all of it is marked
-        for at in range(end - 1, begin - 1, -1):
+        for at in range(begin, end):
             status[at] = mark

=== lanes/leases.py: lanes/test_cpu.py contracts/test_deaths.py
the marks that a dead worker has set stay
-            self._completions.clear(begin, end)
+            pass

a worker that stops before a sample that its parent takes for begun is waited for
-        if lease.cut:
-            self._settle(lease)

a worker's later lease is reported before an earlier one that ends meanwhile
-for lease in reversed(self._leases.values()):
+for lease in list(self._leases.values()):

=== memory/status_board.py: memory/test_status_board.py
a worker that stops just before its parent looks has not said where
-            return self.stopped(worker, run, chunk)
+            return None

samples are taken back without a fence
         self.words[row + LIMIT] = base_of(run, chunk) + keep
-        self.fence()
         started = self.words[row + STARTED]

what a worker has started is read before it is limited
+        started = self.words[row + STARTED]
         self.words[row + LIMIT] = base_of(run, chunk) + keep
         self.fence()
-        started = self.words[row + STARTED]

what a worker has started is read of its next task
-        started = self.words[row + STARTED]
-        self.fence()
         if self.words[row + CHUNK] != chunk:  # last: what it has started may be its next task's by then
             return self.stopped(worker, run, chunk)
+        started = self.words[row + STARTED]
         return max(keep, started)

a worker is asked to hand over before it knows where
+            self.words[self.row(worker) + HAND] = chunk
+            self.fence()
             self.words[self.row(worker) + SPLITS] = sum(1 << split for split in set(splits) if split < _BITS)
-            self.fence()
-            self.words[self.row(worker) + HAND] = chunk

the ring's end before its block
+        self.words[row + TAIL] = tail + 1
         self.words[row + _ROW + tail % _RING] = offset
-        self.words[row + TAIL] = tail + 1

=== memory/status_board.py: lanes/test_processes.py
a replacement begins before its parent knows of it
-        while self.words[known] != os.getpid():
+        while not known:

=== lanes/worker_channels.py: lanes/test_processes.py
what the consumer has of a worker's arena goes with its loader
-arena.forsake(self.loans.lent_by(owner))
+arena.forsake(())

=== lanes/stacks.py: contracts/test_hangs.py
stacks of one worker are taken for those of another
-                pid, _, _ = _CREDENTIALS.unpack(credentials[0][2])
+                pid = next(iter(self._written), 0)
""")
