"""Faults of who looks from outside: at a run that goes on, and at a script that is analysed."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = (
    Fault(
        "another user's process is told how the loaders stand",
        "observe/stats_socket.py",
        "            if is_ours(connection):\n",
        "            if connection:\n",
        ("observe/test_watching.py",),
    ),
    Fault(
        "a forked process holds its parent's socket",
        "observe/shared_service.py",
        "            running.abandon()\n",
        "            pass\n",
        ("observe/test_watching.py",),
    ),
    Fault(
        "a folder that lets others in is trusted",
        "memory/private_folder.py",
        "    if not _is_private(found):\n",
        "    if not found:\n",
        ("memory/test_private_folder.py",),
    ),
    Fault(
        "counters of an epoch are lost with it",
        "observe/counters.py",
        "        if COUNTERS[key[0]].kind is _EPOCH or begun.get(key, 0.0) < last:\n",
        "        if COUNTERS[key[0]].kind is not _EPOCH and begun.get(key, 0.0) < last:\n",
        ("observe/test_metrics.py",),
    ),
    Fault(
        "noise counts as a stall",
        "lab/analysis/breakdown.py",
        "0 < seconds < _TIMES_THE_ERROR * error",
        "0 < seconds < 0 * error",
        ("lab/analysis/test_verdict.py",),
    ),
    Fault(
        "a loader that the analysis makes is taken for the script's",
        "lab/analysis/subject.py",
        "        self._own.add(made)\n",
        "",
        ("lab/analysis/test_watching.py", "lab/analysis/test_scripts.py"),
    ),
    Fault(
        "what this machine cannot run is said to be verifiable",
        "lab/analysis/predict.py",
        "value == own or runs_here)",
        "True)",
        ("lab/analysis/test_whatif.py",),
    ),
    Fault(
        "workers beyond the cores are as fast as others",
        "lab/analysis/predict.py",
        "max(1.0, workers * self.profile.prepare_cpu_share / self.profile.cores)",
        "1.0",
        ("lab/analysis/test_whatif.py",),
    ),
    Fault(
        "a step that computes takes no core from the workers",
        "lab/analysis/predict.py",
        "(step_s + profile.loader_s) * profile.batches",
        "0.0",
        ("lab/analysis/test_whatif.py",),
    ),
    Fault(
        "an epoch is over before its bytes are read",
        "lab/analysis/predict.py",
        "np.maximum(read_s, self._computed_s(drawn))",
        "self._computed_s(drawn)",
        ("lab/analysis/test_whatif.py",),
    ),
    Fault(
        "what batches lose by their order is taken for a slot's own",
        "lab/analysis/predict.py",
        "slot_s * float(np.clip(np.mean(simulated) / rate, 0.5, 2.0))",
        "slot_s",
        ("lab/analysis/test_whatif.py",),
    ),
    Fault(
        "an epoch that was tried in part is taken for the whole",
        "lab/analysis/trials.py",
        "each * max(0, profile.batches - len(times))",
        "0.0",
        ("lab/analysis/test_trials.py",),
    ),
    Fault(
        "metrics are served to everybody",
        "observe/metrics_server.py",
        '"127.0.0.1"',
        '"0.0.0.0"',
        ("observe/test_metrics.py",),
    ),
)
