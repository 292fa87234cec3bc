"""Faults of saving and resuming: positions, occurrences, generators, ranks."""

from __future__ import annotations

from tests.mutations.fault import read

FAULTS = read(r"""
=== sampling/delivered_positions.py: sampling/test_sampling.py
going back counts batches that the consumer never got
-for before, returned in self._recent if returned]
+for before, _ in self._recent]

positions above the line are lost
-ones = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
+ones = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="big")

=== sampling/occurrences.py: contracts/test_table.py
keys that came before a save have not come
-            seen += np.unpackbits(np.frombuffer(bits, np.uint8), count=len(seen))

=== sampling/occurrences.py: sampling/test_sampling.py contracts/test_content.py
NumPy's whole numbers are other keys than Python's (reverts 2280728)
-        if type(name) is int and name is not key:  # NumPy's or PyTorch's: it has the same draws
-            return self._one(name)

repeats of a key are its first occurrence
-return seen[key] - 1
+return 0

=== sampling/order.py: sampling/test_sampling.py contracts/test_resume_generators.py
generators are kept from before the order begins (reverts 2280728)
-        self.begun_from = begun_from
+        self.begun_from = begun_from or (sampling and packed_states(sampling.generators))

=== sampling/order.py: contracts/test_resume_errors.py
a sampler that has raised ahead of need is taken for one that has ended
-        except Exception:
-            self._failed = True
-            raise

=== sampling/order.py: contracts/test_resume_refused.py
a sampler that leaves its generator out of its state goes on with other keys
-or witness_of(sampling.keys_of(*following)) != witness:
+or False:

=== sampling/order.py: contracts/test_resume_samplers.py
a save asks a sampler for its state before its first key
-            self._draw_for_save(1)
+            pass

=== sampling/order.py: sampling/test_sampling.py contracts/test_resume_samplers.py
what a save has drawn ahead is lost
-                (item,), self._ahead = self._ahead.following, None
+                self._ahead = None
+                continue

=== sampling/samplers.py: contracts/test_table.py
a sampler that has ended is asked again (reverts d244c1e)
-        if len(batch) < size:
+        if False:

=== sampling/samplers.py: contracts/test_machine.py
generators of the loader are not put back
-                generator.set_state(states[role])
+                pass

=== sampling/epoch_batches.py: sampling/test_sampling.py contracts/test_resume_samplers.py
a batch that is kept for saves has the position after it
-self._keep(KeptBatch(self.place, self.position, keys, occurrences))
+self._keep(KeptBatch(self.place, self.position + len(keys), keys, occurrences))

of the batches that are drawn and not delivered only the last is stored
-first = bisect_right(self.kept, position, key=_position) - 1
+first = len(self.kept) - 1

=== checkpoint/state.py: contracts/test_table.py
a resume counts failures from zero
-delivered.failed = number(progress, "failed")
+delivered.failed = 0

=== checkpoint/state.py: checkpoint/test_state.py
a state of an earlier version is taken for one of this
-if not alike(version, VERSION) or isinstance(version, bool):
+if version not in (5, VERSION):

NumPy's numbers among stored keys come back as Python's (reverts 95440a5)
-return _numpys(word, parts[0])
+return parts[0]

=== checkpoint/global_generator.py: contracts/test_resume_generators.py
the global generator is put back over the user's own seeding (reverts 1c76258)
-        if now() != self._found and
+        if False and

=== checkpoint/ranks.py: contracts/test_resume_ranks.py
what all ranks delivered counts for the first
-        theirs = left[rank :: len(parts)]
+        theirs = left[:: len(parts)]

ranks that seeded differently are merged
-    if not _all_alike([{name: state[name] for name in _SEEDS} for state in all_]):
+    if False:

=== checkpoint/ranks.py: contracts/test_padding.py contracts/test_resume_ranks.py
every rank goes on with the failures of all
-"failed": failed + (mine["rank"] < rest)}
+"failed": failed * mine["replicas"] + rest}

=== epoch/delivery.py: contracts/test_resume_errors.py contracts/test_table.py
a batch that raised is delivered again after a resume (reverts 2280728)
-            self._cursor.delivered(self._failed, failed=self._failures.count, returned=False)

=== sampling/worker_streams.py: contracts/test_resume_errors.py
a stream without a state that has raised is saved all the same
-        stands = state, told.ended, told.error or error,
+        stands = state, told.ended, None,

a stream without a state that has raised is saved after the batch that follows
-told.error or error,
+told.error,

=== sampling/worker_streams.py: contracts/test_table.py
streams taken back by a batch go on with the worker after it
             places[number] = before
-            turn = number

=== lanes/streams.py: contracts/test_resume_generators.py
a stream is read again without what its collate_fn drew
-                self._check_collate(data)
+                pass

=== epoch/inline.py: contracts/test_resume_generators.py
a stream that draws from a global generator is read again without workers
-if stream is not None and not stream.ended and stream.drew:
+if False:

=== checkpoint/cursor.py: contracts/test_resume_ranks.py
a state says the epoch that the sampler is told now, not that of its order (reverts 9fce1f7)
-"set_epoch": epoch.sampler_epoch}
+"set_epoch": sampling.sampler_epoch}

=== checkpoint/cursor.py: contracts/test_resume_samplers.py
keys that are left have come once more
-"occurrences": [batch.occurrences for batch in kept],
+"occurrences": [],

=== checkpoint/cursor.py: contracts/test_table.py
an epoch that goes on expects what an earlier run has delivered
-max(0, expected - epoch.delivered.samples)
+max(0, expected)

=== window/records.py: engine/test_assembly.py
what is left of a batch has the occurrences of the batch's beginning
-None if self.occurrences is None else self.occurrences[lo:hi]
+None if self.occurrences is None else self.occurrences[: hi - lo]

=== sampling/sharded_dataset.py: contracts/test_elastic.py contracts/test_table.py
what a worker had left of a shard is given to every worker
-self.begun[worker::workers], numbers)
+self.begun, numbers)

shards are dealt out anew without the last ones
-numbers.append(part[(worker - dealt) % workers :: workers])
+numbers.append(part[worker : len(part) // workers * workers : workers])

a shard that goes on begins anew
-islice(samples, delivered)) < delivered
+islice(samples, 0)) < 0

=== checkpoint/streams.py: contracts/test_elastic.py
streams that had ended are split, too
-    going = [at for at in places if not at.ended] or places
+    going = places

a state of some batches ago is split as if it were of the last
-    if any(at.since for at in going):
+    if False:

streams that were shared out anew begin with the worker whose turn it was
-turn = saved["turn"] if len(places) == len(saved["streams"]) else 0
+turn = saved["turn"]
""")
