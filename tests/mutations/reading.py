"""Faults in reading ahead: what is there, whose it is, and when a worker may have it."""

from __future__ import annotations

from tests.mutations.fault import read

FAULTS = read(r"""
=== sources/blocks.py: sources/test_reading.py sources/test_service.py
a copy of a block that has been given to something else is taken for what it was
-    return data if os.pread(arena.fd, HEAD, block) == wanted else None
+    return data

=== sources/page_cache.py: sources/test_page_cache.py
a file that has grown since it was brought into the page cache is read in part
-        if source.length is None and os.fstat(file).st_size - source.offset != nbytes:
+        if source is None:

=== sources/files.py: sources/test_files.py
a file that does not come holds up all others
-                self._loop.call_soon_threadsafe(self._add_thread)

=== sources/source.py: sources/test_reading.py
a copy of another version of a URL is used from memory
-        if self.version:
-            return (*place, str(self.version))

a relative path is looked up in another directory
-path = os.path.join(os.getcwd(), self.file.removeprefix("./"))
+path = self.file

=== sources/service.py: sources/test_service.py
a read of an earlier run is told of a ticket with the same number
-self._tickets.get(ticket.number) is ticket:
+ticket.number in self._tickets:

the limit holds for the oldest place too
-            if not due and self._ahead + size > self._limit:
+            if self._ahead + size > self._limit:

what is wanted again much later is shared at once, and stays until then
-        if found is not None and found.kept:
+        if found is not None:

memory that another ticket still needs is freed
-        if not each.users:
-            self._let_go(each)
+        self._let_go(each)

a copy that goes from memory while it is in use is freed
-            if live is not None and live.kept and live.block == gone.block:
+            if live is not None and live.kept and live.block != gone.block:

what waits to be written to disk is freed when its sample is prepared
-        each.users += 1
         if not self.disk.write

=== pipeline/kept_fields.py: test_kept_fields.py
a tensor that requires grad is kept
- != "cpu" or value.requires_grad:
+ != "cpu":

an array of a class of its own is kept as one of another
-        if kind in (np.ndarray, np.memmap) and not
+        if not

a field that depends on a draw is taken for one that does not
-name not in writer or writer[name] in self._fixed
+True

fields are kept that a later stage has changed in place
-            return np.array(value, order="A", subok=False)
+            return value

=== lanes/field_keeper.py: contracts/test_kept_fields.py
kept fields are used whatever the data set has returned
-            if belongs_to == given:
+            if given is not None:

=== sources/reader.py: contracts/test_kept_fields.py
kept fields are used whatever has made them
- and self._pipeline is pipeline

=== sources/memory_tier.py: sources/test_fields.py
raw bytes are kept beside the fields of their sample
-        if kept:
+        if not kept:
             going +=

=== sources/memory_tier.py: sources/test_service.py
another policy's positions begin where the last one's ended (reverts d3026a6)
-policy, self._at
+policy, 0

=== scheduling/scheduler.py: scheduling/test_scheduler.py sources/test_read_ahead.py
a sample is given to a lane before its bytes are there
-        if event.fetched is None:
+        if True:

=== sources/disk_pool.py: sources/test_disk_pool.py
a copy on disk gets the version that the file has when it is written
-kept = self._tier.write(tier_key(key), version,
+kept = self._tier.write(tier_key(key), version_of(Source(*key)),

=== sources/process.py: contracts/test_cache.py
what was counted for workers that have ended is counted for the next
-        self._service.count_anew()

what waits to be written is not on disk when workers have ended
-                self._leave_disk()
                 self._loop

an error in the reader process leaves samples without an answer (reverts 01cf5ae)
-    if "handle" in context:
+    if False:

=== sources/process.py: sources/test_host_reader.py
one loader's noise ends the process of all
-            if not all(map(_is_message, found)):
+            if found is None:

=== epoch/session.py: contracts/test_cache.py
a fork asks its parent's reader process
-            self.readers = ReaderOwner()
             self.facts

=== sources/pool.py: sources/test_pool.py
a step that did not pay is kept
-            if rate < _PAYS * rate_before and queues:
+            if False:

all that is missing is asked for at once
-        return self.limit if behind else min(self.limit, _AT_LEISURE)
+        return self.limit

=== sources/remote.py: sources/test_pool.py
nobody is asked a second time
-        if self._allowed < 1.0:
+        if True:

what may not be asked again at once is forgotten
-                break
+                self._late.pop(number)

a second request that takes long is waited for
-        self._watch(read)
+        if not is_second: self._watch(read)

=== sources/remote.py: sources/test_reading.py
all URLs of a protocol are read from the first one's host (reverts 4803bf7)
-name = _protocol(source), *sorted(options.items())
+name = (_protocol(source),)

=== engine/epochs.py: sources/test_read_ahead.py
what a sampler raises beyond the window is raised at once
-                if not self._ahead and self._place < raises_below:
-                    raise
+                raise

=== sampling/lookahead.py: sampling/test_lookahead.py contracts/test_cache_orders.py
what is foretold of a generator leaves out the seeds that the loader draws from it
-        self._states[epoch + 1] = _after_seed(state) if self._seeds else state
+        self._states[epoch + 1] = state

drawing orders ahead moves the global generator
-        with torch.random.fork_rng(devices=()):
+        if True:

an order that does not come true is held on to
-        return foretold is not None and torch.equal(foretold, late._states[late.first])
+        return True

=== sources/messages.py: sources/test_messages.py contracts/test_cache_orders.py
a large message to the reader process is lost
-            if data == _ELSEWHERE and file >= 0:
+            if False:

=== sources/reading.py: sources/test_reading.py
a part of a file that ends too early is short without a word
-    check_length(source, len(data))
     return data

=== sources/shared_reads.py: sources/test_shared_reads.py
memory that another loader still needs is freed
-            for _ in clients[1:]:
-                self.blocks.add_user(block)

a read that one loader has given up is given up for all
-        if len(read.clients) == 1:
+        if read.clients:

what one loader needs now waits for all that another wants
-        elif read.number - turn > _SOONER * _TURN:
+        elif False:

what loaders that share keep takes each other's place
-super().offer(len(self._copies), copy, now)
+super().offer(item, copy, now)

=== sources/shared_reads.py: sources/test_peers.py
every host keeps what another one owns
-        if not self._whole.owns(copy.key):
+        if False:

=== sources/host_reader.py: sources/test_host_reader.py
another version of the protocol is spoken to
-return f"share-{PROTOCOL}-{share}"
+return f"share-{share}"

another user's process is let in
-        if is_ours(connection):
+        if connection:

a reader process stays when the last loader has gone
-            self._linger(LINGER_S)

=== sources/prepared_samples.py: sources/test_prepared_samples.py
every loader prepares what another prepares for it
-            if sample.owner is None and not sample.is_staged and sample not in self.granted:
+            if not sample.is_staged and sample not in self.granted:

a loader has samples to prepare for others that are not in its window
-        while self._ahead and (self._ahead[0] < end or group.why_not):
+        while self._ahead:

samples that a stopped loader was to prepare are waited for
-                sample.owner, self.is_late = None, True
+                self.is_late = True

samples that failed, or whose loader has left, are waited for
-        if sample.owner is self:
-            sample.owner = None

prepared samples stay beyond the budget
-        while self._nbytes > self.budget:
+        while self._nbytes > 2**60:

the first loader that comes is believed, which may need nothing yet
-self.believed = self.believed or not any(one.believed for one in self.group.members)
+self.believed = self.believed or self is self.group.members[0]

a loader is believed before its samples have been compared
-            elif self.believed and sample.is_staged and sample.checksum is not None:
+            elif sample.is_staged and sample.checksum is not None:

samples are shared that are not the same
-            self.group.why_not = self.group.why_not or _DIFFERENT
+            pass

prepared samples stay although all have had them
-        if not sample.wanted and sample.is_staged and sample.had >= max(2, len(self.group.members)):
+        if sample is None:

=== scheduling/scheduler.py: scheduling/test_pacing.py
a sample that is but to be copied counts as one to be prepared
-            self._intake.add_copies(lo, hi, place)
+            self._queue(place, lo, hi)

=== scheduling/dispatch.py: scheduling/test_pacing.py
what has arrived is given to workers neighbour by neighbour
-self.policy.inspect or self.fetching.watches
+self.policy.inspect

=== sources/sent_samples.py: sources/test_sent_samples.py
a copy is taken although its block has become another's
-    return data if xxh3_64_intdigest(data.data) == checksum else None
+    return data

=== lanes/produce.py: lanes/test_seeding.py
a sample is sent that was prepared without its seed
-            or self.sharing is not None

=== sources/fingerprint.py: sources/test_samples_prepared_once.py
another data set's samples are taken
-    found.update(pickled.getvalue())

=== engine/read_ahead.py: sources/test_samples_prepared_once.py
samples of another seed are taken
-sample_seed(self._seeds[record.epoch], 0,
+sample_seed(0, 0,

=== sources/peers.py: sources/test_peers.py
bytes of another host are believed
-        if xxh3_64_intdigest(view) != checksum:
+        if False:

whoever connects is sent files of this user
-        if not proves(said[NONCE_BYTES:], b"client", nonces):
+        if False:

a host that has left is asked for ever
-        if peer.address not in self._left_out:
+        if False:

a host is left out for good
-        del self._left_out[peer.address]

a host that reads for long says nothing
-                    await _send(end, ANSWER.pack(READING, 0))
+                    pass

a connection that was idle for long costs a host its place
-                if not is_used:  # else the peer may have closed it because it was idle
+                if True:
""")
