"""The HTTP server of ``metrics_port``: one for each address, shared by all loaders of the process.

Decision: not ``prometheus_client.start_http_server``. Its thread wakes twice a second, its loop cannot be ended sooner,
and it looks up the name of this machine, which takes seconds in some networks.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from functools import cache, partial
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from minato_gpu.observe.shared_service import SharedService, SocketThread, StatsProvider, StatsProviders
from minato_gpu.util.messages import from_extra, say_once
from minato_gpu.util.numbers import is_whole

LOOPBACK = "127.0.0.1"
_MOST = 65535
_EXAMPLE = "pass a port, such as 9090, or a text such as '0.0.0.0:9090'"
_TIMEOUT_S = 5.0  # of somebody who connects and asks nothing


class MetricsAddress(NamedTuple):
    """Host and port of the metrics; port 0 is any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def check(cls, given: Any) -> MetricsAddress | None:
        """Resolves the argument ``metrics_port``. Raises TypeError or ValueError that names it and says what to do."""
        if given is None:
            return None
        if isinstance(given, str):
            try:
                parts = urlsplit(f"//{given}")
                host, port = parts.hostname, parts.port
            except ValueError:
                host = port = None
            if not host or port is None:
                raise ValueError(f"metrics_port={given!r} is no host and port; {_EXAMPLE}, or '[::1]:9090'")
            return cls(host, port)
        if not is_whole(given):
            raise TypeError(f"metrics_port must be a port, a text or None, got {given!r}; {_EXAMPLE}")
        if not 0 <= given <= _MOST:
            raise ValueError(f"metrics_port={given!r}: a port is a number from 0 (any that is free) to {_MOST}")
        return cls(LOOPBACK, int(given))


class _Handler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps requests out of the log."""


class _Server(ThreadingMixIn, WSGIServer):
    """Has a thread for each request, so that a client that hangs holds up no other."""

    daemon_threads = True
    block_on_close = False
    timeout = 0.0  # whoever knocked may have gone

    def server_bind(self) -> None:
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that have gone or do not speak HTTP."""


class MetricsServer(SocketThread):
    """A listening server and its thread. ``address`` is the one that was asked for, with its actual port."""

    def __init__(self, asked: MetricsAddress, providers: StatsProviders) -> None:
        """Raises ModuleNotFoundError without prometheus_client, ValueError if the address cannot be used."""
        with from_extra("metrics"):
            from prometheus_client import CollectorRegistry, make_wsgi_app

            from minato_gpu.observe.metrics import LoaderCollector
        registry = CollectorRegistry(auto_describe=False)
        registry.register(LoaderCollector(providers))
        server = _listening(asked)
        server.set_app(make_wsgi_app(registry))
        self.address = asked._replace(port=server.server_port)
        try:
            super().__init__(server.fileno(), server.handle_request, server.server_close, "minato-metrics")
        except BaseException:
            server.server_close()
            raise


def _listening(asked: MetricsAddress) -> _Server:
    class Server(_Server):
        address_family = socket.AF_INET6 if ":" in asked.host else socket.AF_INET

    try:
        return Server(asked, _Handler)
    except OSError as error:
        where = f"metrics_port: {asked}"
        if error.errno == errno.EADDRINUSE:
            said = f"{where} is in use, by another rank, say; pass another port for each, or 0 for any that is free"
            raise ValueError(said) from error
        raise ValueError(f"{where} cannot be had: {error}") from error


@cache
def _service(asked: MetricsAddress) -> SharedService:
    return SharedService(partial(MetricsServer, asked))


def export(provider: StatsProvider, asked: MetricsAddress) -> None:
    """Shows the loader to Prometheus until it is gone. Raises what MetricsServer does."""
    service = _service(asked)
    service.add(provider)
    if asked.port == 0 and isinstance(service.running, MetricsServer):
        say_once(f"metrics of process {os.getpid()} are at http://{service.running.address}/metrics", logging.INFO)


def exported_at(asked: MetricsAddress) -> MetricsAddress | None:
    """Returns the actual address of the metrics that were asked for; None where this process serves none."""
    running = _service(asked).running
    return running.address if isinstance(running, MetricsServer) else None
