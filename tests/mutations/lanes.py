"""Faults of lanes told apart: who is woken, whose memory it is, what each can do, and how fast it is."""

from __future__ import annotations

from tests.mutations.fault import read

FAULTS = read(r"""
=== lanes/worker_channels.py: engine/test_lanes.py
that a lane has opened is heard only where somebody has asked
-if opened and self.board.words[ATTENTION] == NOBODY:
+if False:

=== engine/engine.py: engine/test_lanes.py
that a lane has opened is heard only by chance
- or self.pump.loading:
+:

=== engine/engine.py: sources/test_read_ahead.py
bytes that arrive while the consumer is away are heard of only by chance
-        if self.pump.reads is not None:
-            self._minder.hear_reader()

=== engine/pump.py: engine/test_lanes.py
a lane that never opens keeps the pump awake
-self.run.scheduler.pending or comes or (
+self.run.scheduler.pending or comes or bool(self.loading) or (

a task of the run that goes on is not given back
-        if run == self.run.number:
+        if False:
             self.run.recalled(chunk)

the death of a worker settles what is another lane's
- if lane.has_arenas else ())
+)

=== scheduling/scheduler.py: engine/test_lanes.py
a job that is given back is lost
-            if not event.done:
+            if False:
                 self._work.jobs

=== scheduling/scheduler.py: scheduling/test_lanes.py
a lane elsewhere is taken to be as fast as this host's
-            if lane.learns:
+            if False:

=== scheduling/dispatch.py: engine/test_lanes.py
lanes that share no memory are to join batches
-if self.jobs and lane.helps:
+if self.jobs and not lane.is_device:

=== scheduling/dispatch.py: scheduling/test_lanes.py
what is left is shared out as if there were no other lane
-2 * max(pace.cpu_capacity, 1) / lane.speed
+2 * max(lane.slots, 1)

=== scheduling/routing.py: scheduling/test_lanes.py
the threshold counts the slots of one CPU lane
-cpu_slots, cpu_s = cpu_slots + slots, cpu_s + seconds
+cpu_slots, cpu_s = slots, seconds

=== lanes/shared_pickle.py: lanes/test_shared_pickle.py
a second worker gets the descriptors of a shared tensor under other numbers
-            for fd in self._fds:
-                starting.duplicate_for_child(fd)
+            pass

every worker of a fork server imports what it needs by itself
-    multiprocessing.set_forkserver_preload([*wanted, "minato_gpu.lanes.processes", *known])

=== epoch/iterator.py: contracts/test_resume_generators.py
workers that start in a later epoch draw for their streams what those of the first drew
-before = self._number - session.first_epoch if knows_seed else 0
+before = 0

=== lanes/far/samples.py: lanes/test_far.py
rows of a far lane go to the beginning of their place
-which = slice(piece.row + begin, piece.row + end)
+which = slice(begin, end)

an agent's clock is taken for this host's
-ends = [end + clock_s for end
+ends = [end for end

=== lanes/far/lane.py: lanes/test_far.py
an agent that is stopped is waited for
-self._wire.end.settimeout(SILENT_S)
+self._wire.end.settimeout(None)

what a lost agent had is prepared by nobody
-        for each in ended:
-            self._tell(each)

=== lanes/far/lane.py: lanes/test_far_ends.py
an agent whose sessions end is tried again at once
-                self._closed.wait(AGAIN_S)

=== lanes/far/reads.py: lanes/test_far.py
an agent's workers begin before their sources have been read
-            if len(fetched) < len(places):
-                return None

=== lanes/far/wire.py: lanes/test_far_greeting.py
an agent serves whoever connects
-if not proves(theirs[NONCE_BYTES:], b"loader", nonces):
+if False:

an agent of any version will do
-if any(hello.get(name) != mine[name] for name in mine):
+if False:

frames may have any length
-if of_head > _MOST_HEAD or of_body > _MOST_BODY:
+if False:

=== lanes/far/wire.py: lanes/test_far_ends.py
samples without their bytes are taken for finished
-elif sum(map(len, views)) != of_body:
+elif False:

=== lanes/far/agent.py: lanes/test_far_ends.py
workers of an agent that Ray has started may print no more than a pipe holds
-            os.dup2(2, 1)
+            pass

=== lanes/far/ray_lanes.py: lanes/test_far_ends.py
Ray that was shut down is begun again to be asked for an agent
-if not self._ray.is_initialized():  # to
+if False:  # to

a rank's far workers are all on one node
-max(min(len(sizes), cores // _FEWEST), -(-cores // min(sizes)))
+-(-cores // min(sizes))
""")
