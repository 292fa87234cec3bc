"""Faults of memory: leaks, loans that end too early, slabs that are freed twice."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = (
    Fault(
        "a batch is lent when it is looked at, not when it is taken",
        "window/assembly.py",
        "            batch.lent = self.holdings.lend(batch.item)\n",
        "            item = batch.item\n            batch.lent = lambda: self.holdings.lend(item)()\n",
        ("window/test_assembly.py", "engine/test_pump.py", "contracts/test_deadly_samples.py"),
        "d8baa75",
    ),
    Fault(
        "of a place all samples count as inspected",
        "window/assembly.py",
        "record.sources.get(serial) for serial",
        "record.sources[serial] for serial",
        ("window/test_assembly.py", "sources/test_read_ahead.py"),
    ),
    Fault(
        "a block that came back is given back twice",
        "memory/loans.py",
        "            blocks.append(loan.block)\n",
        "            blocks += [loan.block, loan.block]\n",
        ("memory/test_loans.py", "window/test_assembly.py"),
    ),
    Fault(
        "a loan ends with the first view",
        "memory/loans.py",
        "        return array\n",
        "        return array.copy()\n",
        ("memory/test_loans.py", "window/test_assembly.py"),
    ),
    Fault(
        "a used place keeps its marks",
        "window/assembly.py",
        "                    self._completions.give_back(record.marks)\n",
        "                    pass\n",
        ("window/test_assembly.py", "contracts/test_memory.py"),
    ),
    Fault(
        "samples of a batch that was joined keep their memory",
        "window/assembly.py",
        "            self.holdings.release(self.window.at(serial).items.pop(serial, None))\n",
        "            self.window.at(serial).items.pop(serial, None)\n",
        ("window/test_assembly.py", "contracts/test_memory.py"),
    ),
    Fault(
        "samples that are prepared again keep the memory of the first time",
        "lanes/worker.py",
        "                self._store.discard(item)\n",
        "                pass\n",
        ("lanes/test_worker_seeds.py", "lanes/test_worker_telling.py"),
    ),
    Fault(
        "an object that cannot be laid down keeps its parts",
        "lanes/store.py",
        "            for part, _ in parts:\n                handover.free(part)\n",
        "",
        ("memory/test_shared.py", "lanes/test_worker.py"),
    ),
    Fault(
        "a full ring loses what comes back",
        "window/host_memory.py",
        "                loans.give_back([(owner, offset)])\n",
        "                pass\n",
        ("window/test_assembly.py", "engine/test_engine.py"),
    ),
    Fault(
        "what a dead worker had laid down is given back to the next",
        "lanes/leases.py",
        "self._read = deque(block for block in self._read if block[0] != worker)",
        "pass",
        ("lanes/test_leases.py", "lanes/test_processes.py", "contracts/test_deaths.py"),
        "8cc8f9e",
    ),
    Fault(
        "a new worker begins with what its predecessor was to free",
        "memory/status_board.py",
        "        self.words[row + HEAD] = self.words[row + TAIL]\n",
        "",
        ("memory/test_status_board.py", "lanes/test_processes.py", "contracts/test_deaths.py"),
    ),
    Fault(
        "free blocks are not joined with their left neighbours",
        "memory/arena.py",
        "at > 0 and ends[at - 1] == begin",
        "False",
        ("memory/test_arena.py",),
        "e9d06dd",
    ),
    Fault(
        "a label keeps its whole batch",
        "memory/loans.py",
        "return nbytes <= min(_SMALL, block_bytes // 8)",
        "return False",
        ("memory/test_loans.py", "contracts/test_memory.py"),
        "e9d06dd",
    ),
    Fault(
        "bytes of a batch count after it was taken",
        "window/assembly.py",
        "        batch = self._batches.pop(order)\n        self.holdings.bytes -= batch.nbytes\n",
        "        batch = self._batches.pop(order)\n",
        ("window/test_assembly.py", "contracts/test_memory.py"),
    ),
    Fault(
        "a run that was given up is freed while workers write",
        "engine/abandoned.py",
        "        self._held.append((chunks, blocks))\n",
        "        self._held.append((set(), blocks))\n",
        ("engine/test_pump.py", "engine/test_engine.py", "contracts/test_shutdown.py"),
        "c6b02de",
    ),
)
