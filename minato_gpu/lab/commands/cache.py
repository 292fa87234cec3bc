"""``minato-gpu cache``: what a directory of copies holds, whether it is sound, and how to be rid of it."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minato_gpu.lab.commands.common import CommandOutput, shows
from minato_gpu.lab.console import show

if TYPE_CHECKING:
    from minato_gpu.sources.disk.tier import DiskTier


_UNUSED_S = 86400.0


@click.command(short_help="Show, verify or empty a cache on disk.")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option("--verify", is_flag=True, help="Read every copy, and drop those that are not what was written.")
@click.option("--empty", is_flag=True, help="Delete all copies; runs that use them miss them, and go on.")
@shows
def cache(out: CommandOutput, directory: Path, verify: bool, empty: bool) -> None:
    """Show what the cache in DIR holds, which may be in use.

    unused_bytes are those of copies that no run has used for a day, so they are probably of no use. Between newest_s
    and oldest_s seconds have passed since the copies were used or written.

    With --verify damaged copies are dropped, and the exit code is then 1.
    """
    if verify and empty:
        raise click.UsageError("what is to be emptied needs no --verify; give one of them")
    row = _emptied(directory) if empty else _looked_at(directory, verify)
    show(out.console, f"the cache in {directory}", [row])
    out.leave_rows({"command": "cache", "verify": verify, "empty": empty}, [row])
    if row.get("corrupt"):
        raise click.ClickException(f"{row['corrupt']} copies were damaged, and are gone")


def _looked_at(directory: Path, verify: bool) -> dict[str, Any]:
    from minato_gpu.sources.disk.tier import DiskTier

    with closing(DiskTier(directory, None)) as tier:
        return _row(tier) | (tier.verify()._asdict() if verify else {})


def _row(tier: DiskTier) -> dict[str, Any]:
    held = [(entry.length, entry.used_at) for entry in tier.entries()]
    now = time.time()
    return {
        "entries": len(held),
        "content_bytes": sum(length for length, _ in held),
        "disk_bytes": tier.nbytes(),
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
