"""Faults of saving and resuming: positions, occurrences, generators, ranks."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = (
    Fault(
        "going back counts batches that the consumer never got",
        "sampling/delivered.py",
        "for before, returned in self._recent if returned]",
        "for before, _ in self._recent]",
        ("sampling/test_delivered.py", "contracts/test_resume.py"),
    ),
    Fault(
        "positions above the line are lost",
        "sampling/delivered.py",
        'ones = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")',
        'ones = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="big")',
        ("sampling/test_delivered.py", "contracts/test_resume.py"),
    ),
    Fault(
        "a key that comes twice in the window is uncounted once",
        "sampling/occurrences.py",
        "np.subtract.at(np.frombuffer(self._seen, dtype=np.uint8), indices, 1)",
        "np.frombuffer(self._seen, dtype=np.uint8)[indices] -= 1",
        ("sampling/test_sources.py", "contracts/test_resume_rarely.py", "contracts/test_resume_samplers.py"),
        "23dc77b",
    ),
    Fault(
        "NumPy's whole numbers are other keys than Python's",
        "sampling/occurrences.py",
        "        if type(name) is int and name is not key:  # NumPy's or PyTorch's: it has the same draws\n"
        "            return self._one(name)\n",
        "",
        ("sampling/test_sources.py", "contracts/test_resume_keys.py", "contracts/test_content.py"),
        "2280728",
    ),
    Fault(
        "repeats of a key are its first occurrence",
        "sampling/occurrences.py",
        "return seen[key] - 1",
        "return 0",
        ("sampling/test_sources.py", "contracts/test_content.py"),
    ),
    Fault(
        "generators are kept from before the order begins",
        "sampling/orders.py",
        "        self.begun_from = begun_from\n",
        "        self.begun_from = packed_states(generators or {}) if begun_from is None else begun_from\n",
        ("sampling/test_samplers_state.py", "contracts/test_resume_generators.py"),
        "2280728",
    ),
    Fault(
        "a sampler that has ended is asked again",
        "sampling/samplers.py",
        "            return\n",
        "            pass\n",
        ("contracts/test_resume_samplers.py", "contracts/test_resume.py", "contracts/test_resume_rarely.py"),
        "d244c1e",
    ),
    Fault(
        "a sampler that has raised ahead of need is taken for one that has ended",
        "sampling/orders.py",
        "            except Exception:\n                self._failed = True\n                raise\n",
        "",
        ("contracts/test_resume_read_ahead.py",),
    ),
    Fault(
        "a mark names the position after its batch",
        "sampling/sources.py",
        "self._remember(Mark(self.place, first, state, keys))",
        "self._remember(Mark(self.place, first + len(keys), state, keys))",
        ("sampling/test_sources.py", "contracts/test_resume_samplers.py"),
    ),
    Fault(
        "a resume counts failures from zero",
        "checkpoint/positions.py",
        'delivered.failed = s.number(progress, "failed")',
        "delivered.failed = 0",
        ("contracts/test_bad_samples_resumed.py", "contracts/test_resume.py"),
    ),
    Fault(
        "the last sample that did not fail is not restored",
        "checkpoint/positions.py",
        'if progress.get("survivor") is not None:',
        "if False:",
        ("contracts/test_survivors.py",),
    ),
    Fault(
        "generators of the loader are not put back",
        "sampling/samplers.py",
        "                generator.set_state(states[role])\n",
        "                pass\n",
        ("contracts/test_resume_generators.py", "contracts/test_resume.py"),
    ),
    Fault(
        "global generators are put back over the user's own seeding",
        "checkpoint/process_generators.py",
        "            if there.get(name) == found:\n",
        "            if True:\n",
        ("contracts/test_resume_global.py",),
        "1c76258",
    ),
    Fault(
        "what all ranks delivered counts for the first",
        "checkpoint/ranks.py",
        "        theirs = left[rank :: len(parts)]\n",
        "        theirs = left[:: len(parts)]\n",
        ("contracts/test_resume_ranks.py",),
    ),
    Fault(
        "every rank goes on with the failures of all",
        "checkpoint/ranks.py",
        'return int(whole + (share["rank"] < rest))',
        "return count",
        ("contracts/test_survivors.py", "contracts/test_resume_ranks.py", "contracts/test_bad_samples_resumed.py"),
    ),
    Fault(
        "a rank takes up the first rank's progress",
        "checkpoint/ranks.py",
        'progress: Mapping[str, JSON] = parts[mine["rank"]]',
        "progress: Mapping[str, JSON] = parts[0]",
        ("contracts/test_resume_ranks.py",),
    ),
    Fault(
        "a batch that raised is delivered again after a resume",
        "delivery.py",
        "            self._progress.delivered(self._failed, failed=self._failures.count, returned=False)\n",
        "",
        ("contracts/test_resume_errors.py",),
        "2280728",
    ),
)
