"""``minato-gpu cache``: what a directory of copies holds, and how to be rid of it."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from minato_gpu.lab.commands.common import CommandOutput, shows
from minato_gpu.lab.console import show

_UNUSED_S = 86400.0


@click.command(short_help="Show or empty a cache on disk.")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option("--empty", is_flag=True, help="Delete all copies; runs that use them miss them, and go on.")
@shows
def cache(out: CommandOutput, directory: Path, empty: bool) -> None:
    """Show what the cache in DIR holds, which may be in use.

    unused_bytes are those of copies that no run has used for a day, so they are probably of no use. Between newest_s
    and oldest_s seconds have passed since the copies were used or written.
    """
    row = _emptied(directory) if empty else _looked_at(directory)
    show(out.console, f"the cache in {directory}", [row])
    out.leave_rows({"command": "cache", "empty": empty}, [row])


def _looked_at(directory: Path) -> dict[str, Any]:
    from minato_gpu.sources.disk.tier import DiskTier

    with closing(DiskTier(directory, None)) as tier:
        held = [(entry.length, entry.used_at) for entry in tier.entries()]
        nbytes = tier.nbytes()
    now = time.time()
    return {
        "entries": len(held),
        "content_bytes": sum(length for length, _ in held),
        "disk_bytes": nbytes,
        "unused_bytes": sum(length for length, at in held if now - at > _UNUSED_S),
        "oldest_s": max((now - at for _, at in held), default=None),
        "newest_s": min((now - at for _, at in held), default=None),
    }


def _emptied(directory: Path) -> dict[str, Any]:
    from minato_gpu.sources.disk.directory import wipe
    from minato_gpu.sources.disk.tier import DiskTier

    if wipe(directory):
        return {"entries": 0, "in_use": False}
    with closing(DiskTier(directory, None)) as tier:
        freed = tier.remove([entry.key for entry in tier.entries()])
        return {"entries": 0, "in_use": True, "freed_bytes": freed}
