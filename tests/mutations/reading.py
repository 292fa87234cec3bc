"""Faults in reading ahead: what is there, whose it is, and when a worker may have it."""

from __future__ import annotations

from tests.mutations.fault import Fault

_SERVICE = ("sources/test_service.py",)

FAULTS = (
    Fault(
        "a copy of a block that has been given to something else is taken for what it was",
        "sources/blocks.py",
        "    return data if os.pread(arena.fd, HEAD, block) == wanted else None\n",
        "    return data\n",
        ("sources/test_reading.py", *_SERVICE),
    ),
    Fault(
        "a file that has grown since it was brought into the page cache is read in part",
        "sources/page_cache.py",
        "        if source.length is None and os.fstat(file).st_size - source.offset != nbytes:\n",
        "        if source is None:\n",
        ("sources/test_page_cache.py",),
    ),
    Fault(
        "what memory keeps of files the page cache has as well",
        "sources/local.py",
        "                if where is Where.UNCACHED:\n",
        "                if where is None:\n",
        ("sources/test_placing.py",),
    ),
    Fault(
        "a copy of another version of a URL is used from memory",
        "sources/source.py",
        "        if self.version:\n            return self.path, self.offset, self.length, self.version\n",
        "",
        ("sources/test_version.py",),
    ),
    Fault(
        "a read of an earlier run is told of a ticket with the same number",
        "sources/service.py",
        "self._tickets.get(ticket.number) is ticket:",
        "ticket.number in self._tickets:",
        _SERVICE,
    ),
    Fault(
        "the limit holds for the oldest place too",
        "sources/service.py",
        "            if not due and self._ahead + size > self._limit:\n",
        "            if self._ahead + size > self._limit:\n",
        _SERVICE,
    ),
    Fault(
        "memory that another ticket still needs is freed",
        "sources/service.py",
        "        if not each.users:\n            self._let_go(each)\n",
        "        self._let_go(each)\n",
        _SERVICE,
    ),
    Fault(
        "a sample is given to a lane before its bytes are there",
        "scheduling/scheduler.py",
        "        if event.fetched is None:\n",
        "        if True:\n",
        ("scheduling/test_scheduler.py", "sources/test_read_ahead.py"),
    ),
    Fault(
        "what a read took is not told to the policies of a cache",
        "sources/pool.py",
        "self._ended(lane, number, block, nbytes, error, seconds)",
        "self._ended(lane, number, block, nbytes, error, 0.0)",
        ("sources/test_pool.py",),
    ),
    Fault(
        "a copy that goes from memory while it is in use is freed",
        "sources/service.py",
        "            if live is not None and live.kept and live.block == gone.block:",
        "            if live is not None and live.kept and live.block != gone.block:",
        ("sources/test_service_tiers.py",),
    ),
    Fault(
        "what waits to be written to disk is freed when its sample is prepared",
        "sources/service.py",
        "        each.users += 1\n        seconds = ",
        "        seconds = ",
        ("sources/test_service_tiers.py",),
    ),
    Fault(
        "a copy on disk gets the version that the file has when it is written",
        "sources/disk_pool.py",
        "kept = self._tier.write(name_of(key), version, ",
        "kept = self._tier.write(name_of(key), version_of(Source(*key)), ",
        ("sources/test_disk_pool.py",),
    ),
    Fault(
        "another policy's positions begin where the last one's ended",
        "sources/memory_tier.py",
        "self._samples * self._parts), self._at\n",
        "self._samples * self._parts), 0\n",
        ("sources/test_memory_tier.py",),
        reverts="d3026a6",
    ),
    Fault(
        "half a table of what is kept is taken up",
        "sources/kept_memory.py",
        "        if data[:1] != _WHOLE:\n",
        "        if not data:\n",
        ("sources/test_kept_memory.py",),
    ),
    Fault(
        "a fork writes where its parent's reader process keeps its copies",
        "session.py",
        "if budget and (self._kept_memory is None or self._kept_memory.process != os.getpid()):",
        "if budget and self._kept_memory is None:",
        ("contracts/test_cache_faults.py",),
        reverts="01cf5ae",
    ),
    Fault(
        "memory is given back while copies of it are written to disk",
        "sources/process.py",
        "        if self._disk is not None:\n            self._disk.finish()\n",
        "        if self._memory is not None:\n            self._arena.forsake(_blocks_of(self._memory))\n"
        "        if self._disk is not None:\n            self._disk.finish()\n",
        ("contracts/test_cache_faults.py",),
    ),
    Fault(
        "an error in the reader process leaves samples without an answer",
        "sources/process.py",
        '    if "handle" in context:\n',
        "    if False:\n",
        ("contracts/test_cache_faults.py",),
        reverts="01cf5ae",
    ),
    Fault(
        "a step that did not pay is kept",
        "sources/concurrency.py",
        "            if rate < _PAYS * rate_before and queues:\n",
        "            if False:\n",
        ("sources/test_pool.py",),
    ),
    Fault(
        "nobody is asked a second time",
        "sources/hedging.py",
        "        if now < self._quiet_until or self._allowed < 1.0:\n",
        "        if True:\n",
        ("sources/test_pool.py",),
    ),
    Fault(
        "what a sampler raises beyond the window is raised at once",
        "engine/epochs.py",
        "                if not self._ahead and self._place < limit:\n                    raise\n",
        "                raise\n",
        ("sources/test_read_ahead.py",),
    ),
)
