"""Faults of who observes: harm to the run, and traces that say what was not."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = (
    Fault(
        "a wait counts for the cause that it began with",
        "engine/engine.py",
        "                    wait.look(perf_counter(), run.scheduler.stall_cause())\n",
        "                    pass\n",
        ("engine/test_window.py",),
    ),
    Fault(
        "the sample that came last may be of another batch",
        "observe/waits.py",
        "if max(lo, begin) < min(hi, end)]",
        "]",
        ("observe/test_waits.py",),
    ),
    Fault(
        "a subscriber that raises ends the run",
        "observe/facts.py",
        "            except Exception:\n",
        "            except KeyError:\n",
        ("observe/test_facts.py",),
    ),
    Fault(
        "a subscriber that raised is called on",
        "observe/facts.py",
        "                self.unsubscribe(subscriber)\n",
        "",
        ("observe/test_facts.py",),
    ),
    Fault(
        "a batch that raised is not told",
        "observe/telemetry.py",
        "            self.facts.publish(f.Failed(self._number, perf_counter(), failed, skipped))\n",
        "            pass\n",
        ("observe/test_facts.py",),
    ),
    Fault(
        "when costly samples ended is told of the last alone",
        "lanes/leases.py",
        "known.update(times=times, ends=ends)",
        "known.update(times=times, ends=ends[-1:])",
        ("lanes/test_cpu.py",),
    ),
    Fault(
        "a trace takes more bytes than it may",
        "observe/trace.py",
        "        if len(data) > self._room:\n",
        "        if not self._room:\n",
        ("observe/test_trace.py",),
    ),
    Fault(
        "a fork writes into its parent's trace",
        "observe/trace.py",
        "        if self._file < 0 or os.getpid() != self._process:\n",
        "        if self._file < 0:\n",
        ("observe/test_trace.py",),
    ),
    Fault(
        "two traces are written to one file",
        "observe/trace.py",
        "            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "",
        ("observe/test_trace.py",),
    ),
    Fault(
        "an arrow leads to the first of the batches that a chunk was for, and to no other",
        "observe/trace.py",
        " = [before] * (begin < lo) + [after] * (hi < end)\n",
        " = [before] * (begin < lo)\n",
        ("observe/test_trace.py",),
    ),
    Fault(
        "what was ready of an epoch that was left is counted as ready for ever",
        "observe/trace.py",
        "            self._samples_ready = 0\n",
        "",
        ("observe/test_trace.py",),
    ),
)
