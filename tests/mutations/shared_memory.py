"""Faults in the order in which processes read and write shared memory: see completions.py and status_board.py."""

from __future__ import annotations

from tests.mutations.fault import Fault

_FENCE = "        self._fence()\n        self._unfence()\n"
_RECORD = "        completions.record(begin, took, end, elapsed, worker, locations)\n"
_STATUS = "        completions.set_ready(begin, stop, in_rows=locations is None)\n"
_STORES = "        for at in range(end - 1, begin - 1, -1):\n            status[at] = mark\n"
_SPLITS = (
    "            self.words[self.row(worker) + SPLITS] = sum(1 << split for split in set(splits) if split < _BITS)\n"
)
_HAND = "            self.words[self.row(worker) + HAND] = chunk\n"
_LIMIT = "        self.words[row + LIMIT] = base_of(run, chunk) + keep\n        self.fence()\n"
_STARTED = "        started = self.words[row + STARTED]\n"
_SAME = (
    "        if self.words[row + CHUNK] != chunk:  # last: what it has started may be its next task's by then\n"
    "            return self.stopped(worker, run, chunk)\n"
)
_COMPLETIONS = ("memory/test_completions.py",)
_BOARD = ("memory/test_status_board.py",)

FAULTS = (
    Fault(
        "the status byte before the record",
        "memory/completions.py",
        _RECORD + _FENCE + _STATUS,
        _STATUS + _FENCE + _RECORD,
        _COMPLETIONS,
    ),
    Fault(
        "no fence between the record and the status byte",
        "memory/completions.py",
        _RECORD + _FENCE + _STATUS,
        _RECORD + _STATUS,
        _COMPLETIONS,
    ),
    Fault(
        "no fence between the status byte and the count",
        "memory/completions.py",
        _STATUS + _FENCE,
        _STATUS,
        _COMPLETIONS,
    ),
    Fault(
        "the count before the status byte",
        "memory/completions.py",
        _STATUS + _FENCE + "        need = words[AWAITED_NEED]\n",
        "        need = words[AWAITED_NEED]\n" + _STATUS + _FENCE,
        _COMPLETIONS,
    ),
    Fault(
        "no fence between what is awaited and the count",
        "memory/completions.py",
        "        self._board.fence()\n        return self._completions.ready(begin, end) >= need\n",
        "        return self._completions.ready(begin, end) >= need\n",
        _COMPLETIONS,
    ),
    Fault(
        "what is awaited is exchanged while workers count",
        "memory/completions.py",
        "        words[AWAITED_NEED] = 0\n        words[AWAITED_BEGIN]",
        "        words[AWAITED_BEGIN]",
        _COMPLETIONS,
    ),
    Fault(
        "status bytes are stored by a copy, which stores some twice",
        "memory/completions.py",
        _STORES,
        "        status[begin:end] = bytes([mark]) * (end - begin)\n",
        _COMPLETIONS,
    ),
    Fault(
        "a batch that is joined by its worker is told before all of it is marked",
        "memory/completions.py",
        _STORES,
        _STORES.replace("range(end - 1, begin - 1, -1)", "range(begin, end)"),
        _COMPLETIONS,
    ),
    Fault(
        "a worker returns what was taken back from it",
        "lanes/worker.py",
        "if not self._base <= self._words[self._row + LIMIT] <= self._base + progress.done:",
        "if True:",
        ("lanes/test_cpu.py",),
    ),
    Fault(
        "a block of marks begins with those of its last place",
        "memory/completions.py",
        "        self._status[first : first + count] = bytes(count)\n        return first\n",
        "        return first\n",
        (*_COMPLETIONS, "engine/test_engine.py"),
    ),
    Fault(
        "the marks that a dead worker has set stay",
        "lanes/leases.py",
        "            self._completions.clear(begin, end)\n",
        "            pass\n",
        ("lanes/test_cpu.py", "contracts/test_deaths.py"),
    ),
    Fault(
        "a worker reads the limit before it says what it starts",
        "lanes/worker.py",
        "            fence()\n            unfence()\n            if base <= words[limit] <= base + done:\n",
        "            if base <= words[limit] <= base + done:\n",
        ("lanes/test_cpu.py",),
    ),
    Fault(
        "a worker that stops just before its parent looks has not said where",
        "memory/status_board.py",
        "            return self.stopped(worker, run, chunk)\n",
        "            return None\n",
        _BOARD,
    ),
    Fault(
        "a worker that stops before a sample that its parent takes for begun is waited for",
        "lanes/leases.py",
        "        if lease.cut:\n            self._settle(lease)\n",
        "",
        ("lanes/test_cpu.py",),
    ),
    Fault(
        "samples are taken back without a fence",
        "memory/status_board.py",
        _LIMIT + _STARTED,
        _LIMIT.replace("        self.fence()\n", "") + _STARTED,
        _BOARD,
    ),
    Fault(
        "what a worker has started is read before it is limited",
        "memory/status_board.py",
        _LIMIT + _STARTED,
        _STARTED + _LIMIT,
        _BOARD,
    ),
    Fault(
        "what a worker has started is read of its next task",
        "memory/status_board.py",
        _STARTED + "        self.fence()\n" + _SAME + "        return max(keep, started)\n",
        _SAME + _STARTED + "        return max(keep, started)\n",
        _BOARD,
    ),
    Fault(
        "a worker is asked to hand over before it knows where",
        "memory/status_board.py",
        _SPLITS + "            self.fence()\n" + _HAND,
        _HAND + "            self.fence()\n" + _SPLITS,
        _BOARD,
    ),
    Fault(
        "the ring's end before its block",
        "memory/status_board.py",
        "        self.words[row + _ROW + tail % _RING] = offset\n        self.words[row + TAIL] = tail + 1\n",
        "        self.words[row + TAIL] = tail + 1\n        self.words[row + _ROW + tail % _RING] = offset\n",
        _BOARD,
    ),
    Fault(
        "a worker rings and has not said that it is through",
        "lanes/worker.py",
        "        words[self._row + CHUNK] = -1\n        self._board.fence()\n",
        "        self._board.fence()\n",
        ("lanes/test_cpu.py",),
    ),
    Fault(
        "a worker names its task and has not forgotten how far the last one came",
        "lanes/worker.py",
        "            words[row + STARTED] = words[row + STAGE] = words[row + BYTES] = 0\n",
        "",
        ("lanes/test_cpu.py",),
    ),
    Fault(
        "a worker's later lease is reported before an earlier one that ends meanwhile",
        "lanes/leases.py",
        "for lease in reversed(self._leases.values()):",
        "for lease in list(self._leases.values()):",
        ("lanes/test_cpu.py",),
    ),
    Fault(
        "what the consumer has of a worker's arena goes with its loader",
        "lanes/worker_channels.py",
        "arena.forsake(self.loans.lent_by(owner))",
        "arena.forsake(())",
        ("lanes/test_processes.py",),
    ),
    Fault(
        "a replacement begins before its parent knows of it",
        "memory/status_board.py",
        "        while self.words[known] != os.getpid():\n",
        "        while not known:\n",
        ("lanes/test_processes.py",),
    ),
    Fault(
        "stacks of one worker are taken for those of another",
        "lanes/stacks.py",
        "                pid, _, _ = _CREDENTIALS.unpack(credentials[0][2])\n",
        "                pid = next(iter(self._written), 0)\n",
        ("contracts/test_hangs.py",),
    ),
)
