"""Faults of the tier on disk: wrong bytes, space that is lost, locks that are not held."""

from __future__ import annotations

from tests.mutations.fault import Fault

_DISK = "sources/disk/"

FAULTS = (
    Fault(
        "a copy on disk is served without a look at its checksum",
        _DISK + "tier.py",
        " and checksum_of(into) == entry.checksum",
        "",
        ("sources/disk/test_damage.py",),
    ),
    Fault(
        "a copy on disk of any version will do",
        _DISK + "tier.py",
        "if entry.version == version:",
        "if entry:",
        ("sources/disk/test_tier.py",),
    ),
    Fault(
        "a removed copy's place on disk is not freed",
        _DISK + "freeing.py",
        "return punch_hole(file.fd, place[1], size)",
        "return True",
        ("sources/disk/test_budget.py",),
    ),
    Fault(
        "an old version's place on disk is not freed",
        _DISK + "tier.py",
        "        free(self._ledger, self._files, doomed)\n        return True\n",
        "        return True\n",
        ("sources/disk/test_tier.py",),
    ),
    Fault(
        "a writer on disk takes a segment that another writes to",
        _DISK + "files.py",
        "            fcntl.flock(found.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "",
        ("sources/disk/test_tier.py", "sources/disk/test_budget.py"),
    ),
    Fault(
        "a copy on disk goes that another run uses",
        _DISK + "runs.py",
        "return min(needs_from(run, now) for run in runs)",
        "return needs_from(next(iter(runs)), now)",
        ("sources/disk/test_runs.py", "sources/disk/test_upkeep.py"),
    ),
    Fault(
        "a copy on disk goes that a rank beside this one will need",
        "sources/following.py",
        "return found is not None and found <= ranks",
        "return True",
        ("sources/test_following.py", "sources/test_disk_pool_following.py"),
    ),
    Fault(
        "a copy on disk goes while other ranks may be about to begin",
        _DISK + "upkeep.py",
        "if not self._runs.has_read or not may(self.beside()):",
        "if not may(self.beside()):",
        ("sources/test_disk_pool_following.py",),
    ),
    Fault(
        "a copy on disk goes by the orders of another epoch than it was wanted in",
        "sources/service.py",
        "each.key[0] != FIELDS and not self.disk.following.stays(each.sample, each.epoch)",
        "each.key[0] != FIELDS and not self.disk.following.stays(each.sample, self._epoch)",
        ("sources/test_service_tiers.py",),
    ),
    Fault(
        "a copy on disk goes that was read ahead for an epoch that has been left",
        "sources/service.py",
        "if on_disk and each.users:",
        "if on_disk:",
        ("sources/test_service_tiers.py",),
    ),
    Fault(
        "on disk all of the last epoch that there is room for is soon",
        "caching/soon.py",
        "min(reach - place, 1.0)",
        "1.0",
        ("caching/test_soon.py",),
    ),
    Fault(
        "where a disk takes no holes, copies go all the same",
        _DISK + "freeing.py",
        "    return gives_back",
        "    return True",
        ("sources/test_disk_pool_following.py",),
    ),
    Fault(
        "a copy on disk goes that has been used since it was listed",
        _DISK + "ledger.py",
        " and each.used_at < before",
        "",
        ("sources/disk/test_upkeep.py",),
    ),
    Fault(
        "several processes at a time make room on disk",
        _DISK + "directory.py",
        "owned = _is_free(self._owner.fd)",
        "owned = True",
        ("sources/disk/test_upkeep.py",),
    ),
    Fault(
        "a damaged index on disk is believed",
        _DISK + "rebuild.py",
        "if value[-_SEAL:] != sealed or key <= last:",
        "if False:",
        ("sources/disk/test_damage.py",),
    ),
    Fault(
        "a dead writer's lease on disk is never given back",
        _DISK + "ledger.py",
        "            self._index.totals.put(transaction, Total(_CHARGED, sum(each.charged"
        " for each in accounts.values())))\n",
        "",
        ("sources/disk/test_budget.py",),
    ),
    Fault(
        "a fork's copy of a tier goes on as if it were the parent's",
        _DISK + "tier.py",
        "        tier.forked()\n",
        "        pass\n",
        ("sources/disk/test_tier.py",),
    ),
    Fault(
        "an index is renewed while other processes have it open",
        _DISK + "directory.py",
        "        if alone:\n",
        "        if True:\n",
        ("sources/disk/test_directory.py",),
    ),
    Fault(
        "who writes to the index on disk waits for LMDB's mutex",
        _DISK + "index.py",
        "            fcntl.flock(self._folder.fd, fcntl.LOCK_EX)\n",
        "",
        ("sources/disk/test_turns.py",),
    ),
)
