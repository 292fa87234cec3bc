"""Checks the argument ``metrics_port``."""

from __future__ import annotations

from typing import Any, NamedTuple

from minato_gpu.util.numbers import is_whole

LOOPBACK = "127.0.0.1"
_MOST = 65535
_EXAMPLE = "pass a port, such as 9090, or a text such as '0.0.0.0:9090'"


class MetricsAddress(NamedTuple):
    """Host and port of the metrics; port 0 is any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def check(cls, given: Any) -> MetricsAddress | None:
        """Resolves a loader's argument. Raises TypeError or ValueError that names it and says what to do."""
        if given is None:
            return None
        if isinstance(given, str):
            return cls._parsed(given)
        if not is_whole(given):
            raise TypeError(f"metrics_port must be a port, a text or None, got {given!r}; {_EXAMPLE}")
        return cls(LOOPBACK, _port(int(given), given))

    @classmethod
    def _parsed(cls, given: str) -> MetricsAddress:
        host, _, port = given.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not (port.isascii() and port.isdigit()) or not bare or (":" in bare and bare == host):
            raise ValueError(f"metrics_port={given!r} is no host and port; {_EXAMPLE}, or '[::1]:9090'")
        return cls(bare, _port(int(port), given))


def _port(number: int, given: Any) -> int:
    if not 0 <= number <= _MOST:
        raise ValueError(f"metrics_port={given!r}: a port is a number from 0 (any that is free) to {_MOST}")
    return number
