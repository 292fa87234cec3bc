"""Faults of content: what a batch is, beyond the values of its elements, and what is drawn for it."""

from __future__ import annotations

from tests.mutations.fault import read

FAULTS = read(r"""
=== lanes/placement.py: contracts/test_content.py
what a collate_fn draws depends on the worker that joins the batch
-        if self.own_collate and self._seeder is not None:
+        if False and self._seeder is not None:

=== lanes/placement.py: torch_semantics/test_batch_types.py
small tensors that do not fit are left out of their batch
-                        items[number] = self._stored(task, piece, at, value)
+                        pass

=== lanes/worker.py: contracts/test_content.py
what samples have drawn is forgotten as their batch is joined
-if progress.unseeded and self._placement.own_collate and self._producer.drew():
+if False and self._producer.drew():

=== lanes/worker.py: lanes/test_worker.py
what a collate_fn keeps of a sample becomes another sample
-lasting=lasting
+lasting=False

=== lanes/produce.py: lanes/test_worker.py contracts/test_table.py
generators are seeded before the data set alone, not before the stages of a pipeline
-        seeder.seed(stage_seed(seed, number))

all stages of a sample draw the same
-        seeder.seed(stage_seed(seed, number))
+        seeder.seed(seed)

=== lanes/produce.py: lanes/test_worker.py torch_semantics/test_iteration.py
columns by name are taken for samples (reverts ebb0b4c)
-isinstance(returned, (str, bytes)) or hasattr(kind, "keys") else
+isinstance(returned, (str, bytes)) else

=== pipeline/kept_fields.py: contracts/test_kept_fields.py
a cache keeps what a stage has drawn from a global generator
-kept[number] = _DREW if drew() else
+kept[number] =

=== samples.py: sampling/test_sampling.py
a tensor's key is where it lies in memory
-    if hasattr(key, "untyped_storage"):  # a tensor, without an import of torch
+    if False:

=== memory/blobs.py: torch_semantics/test_batch_types.py
tensors lose their order in memory
-return tensor if tensor.is_contiguous() else tensor.clone()
+return tensor.contiguous()

=== memory/layout.py: memory/test_layout.py
tensors of another dtype are stacked all the same
-elif {each.dtype for each in column} != {leaf.dtype} or
+elif

=== memory/layout.py: torch_semantics/test_collate.py
fields of samples that have them in another order are taken for alike (reverts ff673df)
-        for (key, part), (own, item) in zip(parts, value.items(), strict=True):
-            if own != key:  # in another order, too: a batch has that of its first sample
+        for key, part in parts:
+            if key not in value:
                 raise Mismatch
-            _flatten(part, item, out)
+            _flatten(part, value[key], out)

=== lanes/seeding.py: lanes/test_seeding.py torch_semantics/test_randomness.py
a worker's NumPy generator begins with another seed than PyTorch's (reverts 28853c3)
-            np.random.seed(_generate_state(base_seed, worker))
+            del _generate_state

=== sampling/speculation.py: sampling/test_sampling.py contracts/test_content.py
an epoch that was prepared ahead leaves the generator where it was
         self._ahead = False
-        self._set(self._states)
""")
