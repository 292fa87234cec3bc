"""Faults of the cache on disk: wrong bytes, accounts that are not true, locks that are not held."""

from __future__ import annotations

from tests.mutations.fault import Fault

_DISK = "sources/disk/"

FAULTS = (
    Fault(
        "a copy on disk is served without a look at its checksum",
        _DISK + "entry.py",
        " or checksum != _checksum(data, digest, key)",
        "",
        ("sources/disk/test_tier.py",),
    ),
    Fault(
        "a copy on disk of any version will do",
        _DISK + "entry.py",
        'if digest == xxh3_128_digest(version) else "stale"',
        'if True else "stale"',
        ("sources/disk/test_tier.py",),
    ),
    Fault(
        "what a removed copy took on disk stays on the account",
        _DISK + "account.py",
        "totals.nbytes, totals.copies = totals.nbytes - nbytes, totals.copies - 1",
        "totals.copies -= 1",
        ("sources/disk/test_eviction.py",),
    ),
    Fault(
        "what an old version took on disk stays on the account",
        _DISK + "tier.py",
        "took - size - before",
        "took - size",
        ("sources/disk/test_tier.py",),
    ),
    Fault(
        "the budget on disk is exceeded",
        _DISK + "tier.py",
        "totals.nbytes + size > self._room",
        "totals.nbytes > self._room + self._overhead",
        ("sources/disk/test_eviction.py",),
    ),
    Fault(
        "a copy on disk goes that another run uses",
        _DISK + "tier.py",
        "return min([run.uses_since, *find_runs(self._root, run.name)[0]])",
        "return run.uses_since",
        ("sources/disk/test_eviction.py",),
    ),
    Fault(
        "a run that lives is taken for dead",
        _DISK + "runs.py",
        "            fcntl.flock(folder.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)\n",
        "",
        ("sources/disk/test_tier.py",),
    ),
    Fault(
        "a copy on disk that is hit is not marked as used",
        _DISK + "tier.py",
        "                os.utime(fd)\n",
        "                pass\n",
        ("sources/disk/test_eviction.py",),
    ),
    Fault(
        "all copies on disk that nobody uses go at once",
        _DISK + "account.py",
        "                if totals.nbytes <= room - spare:\n",
        "                if False:\n",
        ("sources/disk/test_eviction.py",),
    ),
    Fault(
        "a copy on disk goes while other ranks may be about to begin",
        _DISK + "tier.py",
        "self._run.has_read and self.is_alone()",
        "self.is_alone()",
        ("sources/disk/test_eviction.py",),
    ),
    Fault(
        "a copy on disk goes that another run may need",
        _DISK + "tier.py",
        "self._run.has_read and self.is_alone()",
        "self._run.has_read",
        ("sources/disk/test_eviction.py",),
    ),
    Fault(
        "orders are followed on disk beside another run",
        "sources/disk_retention.py",
        "if not self._alone:",
        "if False:",
        ("sources/test_disk_retention.py",),
    ),
    Fault(
        "a copy on disk goes by the orders of another epoch than it was wanted in",
        "sources/service.py",
        "each.key[0] != FIELDS and not self.disk.following.stays(each.sample, each.epoch)",
        "each.key[0] != FIELDS and not self.disk.following.stays(each.sample, self._epoch)",
        ("sources/test_service.py",),
    ),
    Fault(
        "a copy on disk goes that was read ahead for an epoch that has been left",
        "sources/service.py",
        "if on_disk and each.users:",
        "if on_disk:",
        ("sources/test_service.py",),
    ),
    Fault(
        "on disk all of the last epoch that there is room for is soon",
        "caching/soon.py",
        "min(reach - place, 1.0)",
        "1.0",
        ("caching/test_choice.py",),
    ),
    Fault(
        "a damaged account on disk is believed",
        _DISK + "account.py",
        "return totals if _packed(totals) == found else None",
        "return totals",
        ("sources/disk/test_tier.py",),
    ),
    Fault(
        "after a death copies on disk are not counted anew",
        _DISK + "tier.py",
        "if dead and not living:",
        "if False:",
        ("sources/disk/test_tier.py",),
    ),
    Fault(
        "what a dead process was writing stays on the account",
        _DISK + "runs.py",
        "freed += _reserved(root, name)",
        "freed += 0",
        ("sources/disk/test_tier.py",),
    ),
    Fault(
        "a full disk leaves a half-written file",
        _DISK + "tier.py",
        "                os.unlink(new, dir_fd=run.folder.fd)\n",
        "",
        ("sources/disk/test_tier.py",),
    ),
)
