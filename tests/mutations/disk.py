"""Faults of the cache on disk: wrong bytes, accounts that are not true, locks that are not held."""

from __future__ import annotations

from tests.mutations.fault import read

FAULTS = read(r"""
=== sources/disk/entry.py: sources/disk/test_tier.py
a copy on disk is served without a look at its checksum
- or checksum != _checksum(data, digest, key)

a copy on disk of any version will do
-if digest == xxh3_128_digest(version) else "stale"
+if True else "stale"

=== sources/disk/account.py: sources/disk/test_eviction.py
what a removed copy took on disk stays on the account
-totals.nbytes, totals.copies = totals.nbytes - nbytes, totals.copies - 1
+totals.copies -= 1

all copies on disk that nobody uses go at once
-                if totals.nbytes <= room - spare:
+                if False:

=== sources/disk/account.py: sources/disk/test_tier.py
a damaged account on disk is believed
-return totals if _packed(totals) == found else None
+return totals

=== sources/disk/tier.py: sources/disk/test_tier.py
what an old version took on disk stays on the account
-took - size - before
+took - size

after a death copies on disk are not counted anew
-if dead and not living:
+if False:

a full disk leaves a half-written file
-                os.unlink(new, dir_fd=run.folder.fd)

=== sources/disk/tier.py: sources/disk/test_eviction.py
the budget on disk is exceeded
-totals.nbytes + size > self._room
+totals.nbytes > self._room + self._overhead

a copy on disk goes that another run uses
-return min([run.uses_since, *find_runs(self._root, run.name)[0]])
+return run.uses_since

a copy on disk that is hit is not marked as used
-                os.utime(fd)
+                pass

a copy on disk goes while other ranks may be about to begin
-self._run.has_read and self.is_alone()
+self.is_alone()

a copy on disk goes that another run may need
-self._run.has_read and self.is_alone()
+self._run.has_read

=== sources/disk/runs.py: sources/disk/test_tier.py
a run that lives is taken for dead
-            fcntl.flock(folder.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

what a dead process was writing stays on the account
-freed += _reserved(root, name)
+freed += 0

=== sources/disk_retention.py: sources/test_disk_retention.py
orders are followed on disk beside another run
-if not self._alone:
+if False:

=== sources/service.py: sources/test_service.py
a copy on disk goes by the orders of another epoch than it was wanted in
-each.key[0] != FIELDS and not self.disk.following.stays(each.sample, each.epoch)
+each.key[0] != FIELDS and not self.disk.following.stays(each.sample, self._epoch)

a copy on disk goes that was read ahead for an epoch that has been left
-if on_disk and each.users:
+if on_disk:

=== caching/soon.py: caching/test_choice.py
on disk all of the last epoch that there is room for is soon
-min(reach - place, 1.0)
+1.0
""")
