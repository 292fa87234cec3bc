"""The addresses of other hosts' caches (``cache_peers``): a list of addresses, or found by way of torchrun's store."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

AUTO = "auto"
ADDRESS = "MINATO_GPU_CACHE_ADDRESS"
_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
_HOW = 'a list of each host\'s address, such as ["node1:7500", "node2:7500"], the same on all hosts, or "auto"'


def checked_peers(peers: object) -> tuple[str, ...]:
    """Returns the addresses that ``cache_peers`` names: this host's own first, then all in their order; or AUTO alone.

    Raises TypeError or ValueError unless it names two hosts or more, each once, of which one is known to be this host;
    for AUTO ValueError without torchrun's variables.
    """
    if peers == AUTO:
        missing = [name for name in _TORCHRUN if name not in os.environ]
        if missing:
            raise ValueError(
                f"cache_peers='auto' finds hosts by torchrun, which sets {', '.join(missing)}; start the job by "
                f"torchrun, or pass {_HOW}"
            )
        return (AUTO,)
    if isinstance(peers, str) or not isinstance(peers, Sequence):
        raise TypeError(f"cache_peers must be {_HOW}; got {peers!r}")
    for each in peers:
        check_address(each, "an address in cache_peers", "node1:7500")
    if len(set(peers)) != len(peers) or len(peers) < 2:
        raise ValueError(f"cache_peers must name two hosts or more, and each once, got {peers!r}")
    return own_address(peers), *peers


def check_address(address: object, what: str, example: str) -> None:
    """Raises TypeError or ValueError where ``address`` is no "host:port". The error's text names it by ``what``, and
    gives the ``example``."""
    if not isinstance(address, str):
        raise TypeError(f"{what} must be a text such as {example!r}, got {address!r}")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{what} must be a host and a port, such as {example!r}, got {address!r}")


def own_address(addresses: Sequence[str]) -> str:
    """Returns this host's address among these: that of MINATO_GPU_CACHE_ADDRESS, else the only one that it can bind.

    Raises ValueError if the variable's is none of them, or without it not just one can be bound.
    """
    said = os.environ.get(ADDRESS)
    if said is not None:
        if said not in addresses:
            raise ValueError(f"{ADDRESS}={said} is none of cache_peers, {list(addresses)}")
        return said
    own = [address for address in addresses if _is_own(address)]
    if len(own) != 1:
        raise ValueError(
            f"cache_peers: {'none' if not own else 'more than one'} of {list(addresses)} is an address of this host; "
            f"say by the environment variable {ADDRESS} which one is"
        )
    return own[0]


def _is_own(address: str) -> bool:
    """Returns whether this host can listen there: only its own addresses can be bound."""
    host, _ = split_address(address)
    try:
        family, _, _, _, found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(found)
    except OSError:
        return False
    return True


def listen(peers: Sequence[str]) -> tuple[socket.socket, str]:
    """Returns a listening socket at this host's address, and the address. ``peers``: as ``checked_peers`` returns them.

    Raises OSError where the port is taken, or the host's name is not known.
    """
    host, port = (_towards_master(), 0) if peers[0] == AUTO else split_address(peers[0])
    family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.create_server(found[:2], family=family, backlog=128)
    return listening, f"{host}:{listening.getsockname()[1]}" if peers[0] == AUTO else peers[0]


def _towards_master() -> str:
    """Returns this host's address on the network in which torchrun's master is. Nothing is sent."""
    found = socket.getaddrinfo(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), type=socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
        probe.connect(found[4])
        return str(probe.getsockname()[0])


def found_by_torchrun(address: str, share: str) -> tuple[str, ...]:
    """Returns the addresses of all hosts of this job, in order of their rank; waits until each has said its own.

    Raises RuntimeError (torch's) where the store does not answer.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    run = "/".join((os.environ["TORCHELASTIC_RUN_ID"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    key = f"minato_gpu/{run}/{share}/"
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    store.set(key + os.environ["GROUP_RANK"], address)
    ranks = range(int(os.environ["GROUP_WORLD_SIZE"]))
    return tuple(store.get(f"{key}{rank}").decode() for rank in ranks)


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of "host:port" or "[host]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
