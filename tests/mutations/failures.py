"""Faults in what is done about samples that fail and workers that die or hang: counts, blame, replacements."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = (
    Fault(
        "the sample after the one that killed is blamed",
        "engine/deaths.py",
        "at = (min(claim.started, stop) if reporting else claim.started) - 1",
        "at = min(claim.started, stop) if reporting else claim.started",
        ("engine/test_deaths.py", "contracts/test_deaths.py", "contracts/test_deadly_samples.py"),
    ),
    Fault(
        "a third worker has to die at a sample",
        "engine/deaths.py",
        "        return self._at[what] >= MOST\n",
        "        return self._at[what] > MOST\n",
        ("engine/test_deaths.py", "contracts/test_deaths.py", "contracts/test_deadly_samples.py"),
    ),
    Fault(
        "deaths of an earlier run are counted on",
        "engine/deaths.py",
        "        self._at.clear()\n",
        "",
        ("engine/test_deaths.py", "contracts/test_deaths.py", "contracts/test_deadly_samples.py"),
    ),
    Fault(
        "samples fetched together are blamed together",
        "engine/deaths.py",
        "            self._singly.update(tickets(together))\n",
        "",
        ("engine/test_deaths.py", "contracts/test_deaths.py", "contracts/test_deadly_samples.py"),
        "f8ba8c6",
    ),
    Fault(
        "workers that end before any work are replaced for ever",
        "engine/deaths.py",
        "        if self._unborn[number] >= STARTS:\n",
        "        if False:\n",
        ("engine/test_deaths.py", "contracts/test_deaths.py", "contracts/test_deadly_samples.py"),
    ),
    Fault(
        "samples that were taken back count as repeated",
        "engine/run.py",
        "log.repeated += max(0, min(claim.started, sent.stop) - sent.done)",
        "log.repeated += max(0, claim.started)",
        (
            "engine/test_deaths.py",
            "contracts/test_deaths.py",
            "contracts/test_deadly_samples.py",
            "contracts/test_chaos.py",
        ),
    ),
    Fault(
        "a job that was stopped for a while has workers that hang",
        "faults/watchdog.py",
        "            self._awake = now\n",
        "            pass\n",
        ("faults/test_watchdog.py",),
        "b3ad358",
    ),
    Fault(
        "a graph of several samples has the time of one",
        "faults/watchdog.py",
        "if now - since >= self._limit * each.together:",
        "if now - since >= self._limit:",
        ("faults/test_watchdog.py", "contracts/test_hangs.py"),
    ),
    Fault(
        "max_failures allows one fewer",
        "faults/failures.py",
        "        if self.count > limit:\n",
        "        if self.count >= limit:\n",
        ("contracts/test_bad_samples.py",),
    ),
    Fault(
        "a batch that on_error refuses loses its other samples without a count",
        "faults/failures.py",
        "            self._log.lost(0, delivered)\n",
        "            pass\n",
        ("contracts/test_bad_samples.py", "contracts/test_without_workers.py"),
        "a39b826",
    ),
    Fault(
        "a StopIteration ends the epoch in silence",
        "delivery.py",
        "            if isinstance(error, StopIteration):  # a sample's, say, which would end the epoch in silence\n",
        "            if False:\n",
        ("torch_semantics/test_errors.py", "contracts/test_without_workers.py", "contracts/test_bad_input.py"),
        "6a64706",
    ),
    Fault(
        "a layout that comes after its samples ends the loop",
        "engine/run.py",
        "            if report.chunk not in self.sent:  # its samples' marks came first\n                return\n",
        "",
        ("engine/test_pump.py", "engine/test_engine.py", "torch_semantics/test_map_style.py"),
        "fe6fabd",
    ),
    Fault(
        "lease numbers of a run that was given up silence ends of the next",
        "lanes/leases.py",
        "if half < 1 or next(iter(self._leases))[0] != next(reversed(self._leases))[0]:",
        "if half < 1:",
        ("lanes/test_leases.py", "engine/test_engine.py"),
        "8cc8f9e",
    ),
    Fault(
        "a sampler that raised is not asked again",
        "engine/engine.py",
        "                epochs.draw()  # where the sampler raised last time, or it would be waited for in vain\n",
        "",
        ("contracts/test_resume_errors.py", "contracts/test_bad_input.py", "torch_semantics/test_errors.py"),
        "3d72b01",
    ),
)
