"""Faults of memory: leaks, loans that end too early, slabs that are freed twice."""

from __future__ import annotations

from tests.mutations.fault import read

FAULTS = read(r"""
=== window/assembly.py: engine/test_assembly.py engine/test_engine.py
a batch is lent when it is looked at, not when it has come (reverts d8baa75)
-        lent = self.holdings.lend(item)
+        lent = lambda: self.holdings.lend(item)()

of a place all samples count as inspected
-record.sources.get(serial) for serial
+record.sources[serial] for serial

a used place keeps its marks
-                self._completions.give_back(record.marks)
+                pass

samples of a batch that was joined keep their memory
-        self.holdings.release(items.pop(serial, None))
+        items.pop(serial, None)

=== window/assembly.py: engine/test_assembly.py contracts/test_memory.py
bytes of a batch count after it was taken
         batch = self._batches.pop(order)
-        self.holdings.bytes -= batch.nbytes

=== engine/pump.py: engine/test_engine.py
memory of a run that was given up is free while workers write
-append((chunks, marks, memory))
+append((chunks, marks, []))

a run that was given up is freed while workers write (reverts c6b02de)
-append((chunks, marks, memory))
+append((set(), marks, memory))

=== window/samples.py: engine/test_assembly.py contracts/test_memory.py
a place does not own its slab
-record.slab, record.memory = self._allocate(
+record.slab, _ = self._allocate(

=== device/loads.py: device/test_transfers.py
copies do not keep the slabs that they read
-[self._on_device, self._slabs]
+[self._on_device]

copies of what a device has made do not wait for that
-            accelerator.wait(made.event)
+            pass

who gets a batch does not wait for its copies
-        accelerator.wait(self.event)
+        pass

the memory of a batch may be used again while its consumer reads it
-                accelerator.used_here(block)
+                pass

=== memory/loans.py: memory/test_loans.py engine/test_assembly.py
a block that came back is given back twice
-            blocks.append(loan.block)
+            blocks += [loan.block, loan.block]

a loan ends with the first view
-        return array
+        return array.copy()

=== memory/loans.py: memory/test_loans.py contracts/test_memory.py
a label keeps its whole batch (reverts e9d06dd)
-return nbytes <= min(_SMALL, block_bytes // 8)
+return False

=== lanes/worker.py: lanes/test_worker.py
samples that are prepared again keep the memory of the first time
-                self._store.discard(item)
+                pass

=== lanes/store.py: memory/test_loans.py
an object that cannot be laid down keeps its parts
-            for part, _ in parts:
-                handover.free(part)

=== window/host_memory.py: engine/test_assembly.py
a full ring loses what comes back
-                loans.give_back([(owner, offset)])
+                pass

=== lanes/leases.py: lanes/test_cpu.py lanes/test_processes.py contracts/test_deaths.py
what a dead worker had laid down is given back to the next (reverts 8cc8f9e)
-self._read = deque(block for block in self._read if block[0] != worker)
+pass

=== memory/status_board.py: memory/test_status_board.py contracts/test_deaths.py
a new worker begins with what its predecessor was to free
-        self.words[row + HEAD] = self.words[row + TAIL]

=== memory/arena.py: memory/test_arena.py
free blocks are not joined with their left neighbours (reverts e9d06dd)
-at > 0 and ends[at - 1] == begin
+False

=== lanes/worker_channels.py: lanes/test_cpu.py
memory that was opened before descriptors ran out stays open (reverts e1ac803)
-            undo.callback(self.memory.close)

=== lanes/thread_lane.py: contracts/test_ends.py
a closed loader keeps the descriptors of its threads
-            self._watch.close()
-            os.close(self._bell)
             self._bell = -1
""")
