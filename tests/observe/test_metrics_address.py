"""What ``metrics_port`` may be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minato_gpu import DataLoader
from minato_gpu.observe.metrics_address import MetricsAddress


@pytest.mark.parametrize(
    ("given", "address", "shown"),
    [
        (9090, ("127.0.0.1", 9090), "127.0.0.1:9090"),
        (0, ("127.0.0.1", 0), "127.0.0.1:0"),
        (np.int64(65535), ("127.0.0.1", 65535), "127.0.0.1:65535"),
        ("0.0.0.0:9090", ("0.0.0.0", 9090), "0.0.0.0:9090"),
        ("node-7:0", ("node-7", 0), "node-7:0"),
        ("[::1]:9090", ("::1", 9090), "[::1]:9090"),
    ],
)
def test_addresses(given: Any, address: tuple[str, int], shown: str) -> None:
    found = MetricsAddress.check(given)
    assert found == address and str(found) == shown
    assert MetricsAddress.check(None) is None


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (True, TypeError, "metrics_port must be a port, a text or None, got True"),
        (9090.0, TypeError, "metrics_port must be a port"),
        (["localhost", 9090], TypeError, "pass a port, such as 9090"),
        (-1, ValueError, "metrics_port=-1: a port is a number from 0"),
        (65536, ValueError, "to 65535"),
        ("h:65536", ValueError, "metrics_port='h:65536': a port is"),
        ("", ValueError, "is no host and port"),
        ("9090", ValueError, "is no host and port"),
        (":9090", ValueError, "is no host and port"),
        ("[]:9090", ValueError, "is no host and port"),
        ("host:", ValueError, "is no host and port"),
        ("host:http", ValueError, "is no host and port"),
        ("host:-1", ValueError, "is no host and port"),
        ("host:²", ValueError, "is no host and port"),
        ("::1:9090", ValueError, r"or '\[::1\]:9090'"),
    ],
)
def test_what_is_none(given: Any, kind: type[Exception], said: str) -> None:
    data: Any = range(3)
    with pytest.raises(kind, match=said):
        DataLoader(data, metrics_port=given)
