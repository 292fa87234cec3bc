"""An index written anew from what can be read of it: a script of its own, run in a process of its own.

LMDB maps its file into memory and trusts it: a damaged page can end whoever reads it by a signal, and a damaged list of
free pages has good ones overwritten later. So before anybody uses what an earlier run has left, a child reads all of it
and writes it down anew; no page of the old file is used again. It imports nothing of this package (which would bring
PyTorch) and starts in some 20 ms.

Arguments: the old index, a folder for the new one, bytes of address space, the folder that lmdb was imported from.
Ends with 0: it is there, with all records as they were written; ``NO_ROOM``: the old one is sound, but there is no room
for another; anything else: it is damaged.
"""

from __future__ import annotations

import sys
import zlib

NO_ROOM = 2
_SEAL = 4  # see records.seal


def main(old: str, new: str, map_bytes: str, packages: str) -> int:
    """The exit code."""
    sys.path.append(packages)
    import lmdb

    source = lmdb.open(old, max_dbs=8, create=False, readonly=True, lock=False, readahead=False)
    tables = {}
    for name in [bytes(name) for name, _ in source.begin().cursor()]:
        database = source.open_db(name, create=False)
        with source.begin() as transaction:
            tables[name] = transaction.stat(database)["entries"]
            last, count = b"", 0
            for key, value in transaction.cursor(database):
                count += 1
                sealed = zlib.crc32(value[:-_SEAL], zlib.crc32(key)).to_bytes(_SEAL, "little")
                if value[-_SEAL:] != sealed or key <= last:  # the latter also where pages go round in a circle
                    return 1
                last = key
            if count != tables[name]:
                return 1
    try:
        target = lmdb.open(new, map_size=int(map_bytes), max_dbs=8, mode=0o600, sync=False)
        for name in tables:
            written = target.open_db(name)
            with source.begin() as transaction, target.begin(write=True) as copy:
                for key, value in transaction.cursor(source.open_db(name, transaction, create=False)):
                    copy.put(key, value, db=written, append=True)
        target.sync(True)
    except lmdb.Error:
        return NO_ROOM
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
