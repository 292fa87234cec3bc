"""Faults of lanes told apart: who is woken, whose memory it is, what each can do, and how fast it is."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAR, GREETING = ("lanes/test_far.py",), ("lanes/test_far_greeting.py",)
ENGINE, SCHEDULING = ("engine/test_lanes.py",), ("scheduling/test_lanes.py",)

FAULTS = (
    Fault(
        "a lane without the workers' bell is heard only while the consumer waits",
        "engine/engine.py",
        "        if self._own_fds.any:\n            self._own_fds.arm()\n",
        "",
        ENGINE,
    ),
    Fault(
        "what is told by a lane that is being opened is heard only by chance",
        "engine/engine.py",
        "            self._own_fds.arm(self.pump.loading)\n",
        "",
        ENGINE,
    ),
    Fault(
        "a lane that never opens keeps the pump awake",
        "engine/pump.py",
        "self.run.scheduler.pending or comes or (",
        "self.run.scheduler.pending or comes or bool(self.loading) or (",
        ENGINE,
    ),
    Fault(
        "a lane is asked for its descriptors once",
        "engine/lane_watch.py",
        "for fd in lane.fds() if names is None or lane.name in names else ():",
        'for fd in lane.__dict__.setdefault("_fds", lane.fds()) if names is None or lane.name in names else ():',
        ENGINE,
    ),
    Fault(
        "a task of the run that goes on is not given back",
        "engine/pump.py",
        "            if run == self.run.number:\n                self.run.recalled(chunk)",
        "            if False:\n                self.run.recalled(chunk)",
        ENGINE,
    ),
    Fault(
        "a job that is given back is lost",
        "scheduling/scheduler.py",
        "            if not event.done:\n                self._join_again",
        "            if False:\n                self._join_again",
        ENGINE,
    ),
    Fault(
        "the death of a worker settles what is another lane's",
        "engine/pump.py",
        "owner = lane.owner_of(exit_.number)",
        "owner = exit_.number",
        ENGINE,
    ),
    Fault(
        "lanes that share no memory are to join batches",
        "scheduling/dispatch.py",
        "if self.jobs and lane.helps:",
        "if self.jobs and not lane.is_device:",
        ENGINE,
    ),
    Fault(
        "a lane elsewhere is taken to be as fast as this host's",
        "scheduling/scheduler.py",
        "            if lane.learns:\n",
        "            if False:\n",
        SCHEDULING,
    ),
    Fault(
        "what is left is shared out as if there were no other lane",
        "scheduling/dispatch.py",
        "2 * max(pace.cpu_capacity, 1) / lane.speed",
        "2 * max(lane.slots, 1)",
        SCHEDULING,
    ),
    Fault(
        "the threshold counts the slots of one CPU lane",
        "scheduling/routing.py",
        "cpu_slots, cpu_s = cpu_slots + slots, cpu_s + seconds",
        "cpu_slots, cpu_s = slots, seconds",
        SCHEDULING,
    ),
    Fault(
        "a second worker gets the descriptors of a shared tensor under other numbers",
        "lanes/shared_pickle.py",
        "            for fd in self._fds:\n                starting.duplicate_for_child(fd)\n",
        "            pass\n",
        ("lanes/test_shared_pickle.py",),
    ),
    Fault(
        "all workers unpickle their jobs at a time",
        "lanes/shared_pickle.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        ("lanes/test_shared_pickle.py",),
    ),
    Fault(
        "workers that start in a later epoch draw for their streams what those of the first drew",
        "epoch/iterator.py",
        "before = self._number - session.first_epoch if knows_seed else 0",
        "before = 0",
        ("checkpoint/test_resumed_draws.py",),
    ),
    Fault(
        "every worker of a fork server imports what it needs by itself",
        "lanes/shared_pickle.py",
        '    multiprocessing.set_forkserver_preload([*wanted, "minato_gpu.lanes.processes", *known])\n',
        "",
        ("lanes/test_shared_pickle.py",),
    ),
    Fault(
        "what a far lane is sent before its agent answers is lost",
        "lanes/far/agent_connection.py",
        '            for task, _ in self._tasks.values():\n                wire.send("send", *_parcel(task))\n',
        "",
        FAR,
    ),
    Fault(
        "rows of a far lane go to the beginning of their place",
        "lanes/far/samples.py",
        "which = slice(piece.row + begin, piece.row + end)",
        "which = slice(begin, end)",
        FAR,
    ),
    Fault(
        "an agent's clock is taken for this host's",
        "lanes/far/arrivals.py",
        "ends = [end + clock_s for end",
        "ends = [end for end",
        FAR,
    ),
    Fault(
        "an agent that is stopped is waited for",
        "lanes/far/agent_connection.py",
        "self.wire.end.settimeout(SILENT_S)",
        "self.wire.end.settimeout(None)",
        FAR,
    ),
    Fault(
        "what a lost agent had is prepared by nobody",
        "lanes/far/agent_connection.py",
        "        for each in ended:\n            self._tell(each)\n",
        "",
        FAR,
    ),
    Fault(
        "an agent's workers begin before their sources have been read",
        "lanes/far/reads.py",
        "            if len(fetched) < len(places):\n                return None\n",
        "",
        FAR,
    ),
    Fault(
        "an agent serves whoever connects",
        "lanes/far/greeting.py",
        'if not proves(theirs[NONCE_BYTES:], b"loader", nonces):',
        "if False:",
        GREETING,
    ),
    Fault(
        "an agent of any version will do",
        "lanes/far/greeting.py",
        "if any(hello.get(name) != mine[name] for name in mine):",
        "if False:",
        GREETING,
    ),
    Fault(
        "frames may have any length",
        "lanes/far/frames.py",
        "if of_head > _MOST_HEAD or of_body > _MOST_BODY:",
        "if False:",
        GREETING,
    ),
)
