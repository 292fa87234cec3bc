"""Faults of decisions: what starts when and where, what a batch consists of, what memory allows."""

from __future__ import annotations

from tests.mutations.fault import read

FAULTS = read(r"""
=== scheduling/window_length.py: scheduling/test_pacing.py engine/test_window.py
the window grows whatever it holds
- and batch_bytes and in_flight + batch_bytes <= self.limit:
+:

the window never shrinks
-            self.extra = max(0, self.extra - 1)

=== engine/epochs.py: test_cost_gate.py
cheap batches are admitted one by one
-            if 0 <= room < window.together:
+            if False:

=== scheduling/intake.py: test_cost_gate.py
batches of some milliseconds are dispatched one by one
-return max(policy.chunk_s, min(policy.group_s, fair_s))
+return policy.chunk_s

groups of batches are as long at the end of an epoch
-return max(policy.chunk_s, min(policy.group_s, fair_s))
+return policy.group_s

=== engine/epochs.py: engine/test_window.py
what a sampler raises is raised as soon as a longer window has come to it
-            if isinstance(drawn, Exception) and self._place >= raises_below:
-                return

=== engine/epochs.py: contracts/test_memory.py
after a delivery nothing else seems to be in flight
-return m.Delivered(now, order, step_s, self._parts.assembly.holdings.bytes, self._together)
+return m.Delivered(now, order, step_s)

=== engine/engine.py: engine/test_window.py
a window that has grown is filled at the next delivery only
-while run.scheduler.window.grown:
+while False:

=== engine/settings.py: engine/test_window.py
the window grows although prefetch_factor says how long it is
-longest = self.window if loader.prefetch_given else _MOST_PREFETCH * self.workers
+longest = _MOST_PREFETCH * self.workers

=== engine/pump.py: engine/test_engine.py
the consumer never sleeps while what is ready belongs to no lease that is asked
-replace(awaited, need=ready + 1)
+replace(awaited, need=ready)

each run learns anew what samples take
-        self._known.update(ended.scheduler.lane_costs)

=== scheduling/composition.py: scheduling/test_scheduler.py contracts/test_lateness.py
free batches come one batch later than max_lateness
-return oldest is not None and oldest.number <= self.next - self._lateness
+return oldest is not None and oldest.number < self.next - self._lateness

fixed batches come one batch later than max_lateness
-bool(self._complete) and super().held_back
+bool(self._complete) and self._places.oldest.number < self.next - self._lateness

a user's own batch overtakes into the epoch before
-if self._epochs[0] != place.epoch or (overtakes
+if (overtakes

=== scheduling/composition.py: scheduling/test_scheduler.py scheduling/test_routing.py contracts/test_lateness.py
batches overtake although nobody waits for one
-if overtakes and (not eager or self.held_back):
+if overtakes and self.held_back:

=== scheduling/ledger.py: scheduling/test_routing.py scheduling/test_scheduler.py
samples that run take no memory
-expected = self.running * self.sample_bytes + self.handing * self.handed_bytes
+expected = self.handing * self.handed_bytes

=== scheduling/ledger.py: scheduling/test_routing.py contracts/test_split_points.py
what was handed over holds no memory
-self._handed.add(samples, nbytes)
+pass

=== scheduling/ledger.py: scheduling/test_pacing.py
a credit is free again as the samples are reported that it was reckoned with
-max(int(expected), self.promised)
+int(expected)

one slot gets all that memory may hold while sizes are unknown
-            return min(count, 1 - taken, max(
+            return min(count, max(

=== scheduling/dispatch.py: scheduling/test_pacing.py scheduling/test_scheduler.py contracts/test_memory.py
nothing is set aside for the oldest place
-reserved = 0 if entry.place is self.oldest else self._not_begun()
+reserved = 0

few slots are given long leases until the window shows the epoch's end
-        if left is None and pace.cpu_slots < MANY_SLOTS:
+        if False:

a lease ends with every batch, however small
- > target < seconds + following.seconds(size, each):
+ > target:

=== scheduling/dispatch.py: scheduling/test_scheduler.py contracts/test_memory.py
the oldest sample may not proceed without memory
-must = self.consumer_starves and self.waiting.oldest() is entry
+must = False

=== scheduling/dispatch.py: scheduling/test_pacing.py contracts/test_memory.py
a lease with a budget has no byte credit (reverts 8257426)
-credit = self._ledger.credit(count(spans), handing=stop >= 0)
+credit = 0

=== scheduling/dispatch.py: scheduling/test_scheduler.py lab/simulation/test_comparison.py
leases do not become shorter towards an epoch's end (reverts ff50b95)
-lease = min(lease, left * lane.mean / shares)
+pass

=== scheduling/dispatch.py: scheduling/test_scheduler.py contracts/test_content.py
a lease reaches into the next epoch (reverts 70f827a)
-if following is None or entry.place.epoch != following.place.epoch:
+if following is None:

=== lanes/worker.py: lanes/test_cpu.py
a worker does not show what its task has come to
-                words[nbytes] = progress.nbytes

=== lanes/worker.py: lanes/test_worker.py contracts/test_memory.py
a worker forgets what it has prepared beyond its credit
-progress.nbytes = self._owed(task)
+pass

costly samples wait for others to be told, though their batch does not
-elif self._job.in_order and not (task.credit or self._job.cuts) and
+elif

=== lanes/progress.py: lanes/test_worker.py
samples that are told together have all just been finished
-ends = self._ends(times)
+pass

=== engine/run.py: contracts/test_memory.py
a worker is never told that what it overdrew is known
-self._ended[lane.name][report.worker] = report.chunk
+pass

=== scheduling/routing.py: scheduling/test_routing.py scheduling/test_lanes.py lab/simulation/test_comparison.py
every sample goes to the slower side of the threshold
-return entry.ratio >= self.threshold and bool(self._open(entry.home))
+return entry.ratio < self.threshold and bool(self._open(entry.home))

the threshold forgets what lanes already hold
-device_done = (device_backlog + np.cumsum(device_costs[order])) / device_slots
+device_done = np.cumsum(device_costs[order]) / device_slots

=== scheduling/pacing.py: scheduling/test_pacing.py scheduling/test_routing.py scheduling/test_scheduler.py
slow samples do not start early
-return base - lead
+return float(base)

=== scheduling/pacing.py: scheduling/test_scheduler.py lab/simulation/test_comparison.py
a lease may be as long as the window
-lease = min(window_s * self._policy.lease_share, longest)
+lease = window_s

=== scheduling/flights.py: scheduling/test_pacing.py scheduling/test_scheduler.py
samples that were taken back wait for nobody
-            self.shorten(flight, event.keep, event.nbytes)
+            pass

what a worker has used of its credit is given out again as the rest of its lease is taken back
-max(chunk.credit * keep // chunk.size, nbytes)
+chunk.credit * keep // chunk.size

=== scheduling/scheduler.py: scheduling/test_scheduler.py contracts/test_deaths.py
a dead worker's samples before those given up are lost
-            self._flights.give_back(flight, done, lo)

=== scheduling/history.py: scheduling/test_costs.py torch_semantics/test_samplers.py
what a key without a hash cost cannot be remembered
-return self._others.get(hash(name_of(key)), 0) if place
+return self._others.get(hash(key), 0) if place

=== epoch/session.py: torch_semantics/test_workers.py
workers that persist prepare the next epoch, which nobody has declared (reverts a8e01ee)
-self.speculates = loader.epochs is not None and
+self.speculates = (loader.persistent_workers or loader.epochs is not None) and

=== lanes/worker_lane.py: lanes/test_cpu.py
who closes a lane lets workers do what lies ready for them (reverts e118d72)
-        self._taken_back()
         self.links.activate(self.links.workers)

=== engine/host_share.py: scheduling/test_pacing.py
the rank that is furthest ahead gets the host's cores
-key=lambda at: needs[at].ready)
+key=lambda at: -needs[at].ready)

a rank may be left without a worker
-max(1, min(cores, needs[at].most))
+max(0, min(cores, needs[at].most))

=== engine/host_share.py: engine/test_host_share.py
ranks that have ended keep their share of the host's cores
-rows[:, _WRITTEN] > now - _SILENT_S
+rows[:, _WRITTEN] > 0

=== scheduling/lane_state.py: scheduling/test_costs.py
a GPU that stalls is taken to be slow, and given few samples at once
-if self._micro_batches is not None:
+if False:
""")
