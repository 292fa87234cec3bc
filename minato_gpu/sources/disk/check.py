"""Whether an index can be read from end to end: a script of its own, run in a process of its own.

LMDB maps its file into memory and trusts it: a damaged page can end whoever reads it by a signal, and a circle of
pages keeps a cursor busy for ever. So a child reads all of it first. It imports nothing of this package (which would
bring PyTorch) and starts in some 20 ms. Arguments: the index, the folder that lmdb was imported from. Exit code 0:
all records are what was written.
"""

from __future__ import annotations

import sys
import zlib

_SEAL = 4  # see records.seal


def main(path: str, packages: str) -> int:
    """The exit code."""
    sys.path.append(packages)
    import lmdb

    environment = lmdb.open(path, max_dbs=8, create=False, readahead=False)
    names = [bytes(name) for name, _ in environment.begin().cursor()]
    for name in names:
        database = environment.open_db(name, create=False)
        with environment.begin(db=database) as transaction:
            left = transaction.stat(database)["entries"]
            for key, value in transaction.cursor():
                left -= 1
                if left < 0 or value[-_SEAL:] != zlib.crc32(key + value[:-_SEAL]).to_bytes(_SEAL, "little"):
                    return 1
        if left:
            return 1
    with environment.begin(write=True) as transaction:  # as the first write would find it
        transaction.put(b"check", b"")
        transaction.abort()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
