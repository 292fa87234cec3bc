"""What the processes that fork replacements tell, and descriptors that come with it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from minato_gpu.lanes import spawner
from tests.leaks import descriptors_below


def test_a_process_that_nobody_can_watch_is_said() -> None:
    """Its descriptor is lost where this process may have no more."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there, Path(os.devnull).open() as process:
        spawner._tell(there, ("started", 0, 1234), process.fileno())
        with pytest.raises(OSError, match="Too many open files: no process can be watched"), descriptors_below(3):
            spawner._heard(here)
