"""Metrics as Prometheus reads them: names, counters that never fall, one server for each address (P7)."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import socket
import sys
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minato_gpu import DataLoader
from minato_gpu.observe.metrics import LoaderCollector
from minato_gpu.observe.shared_service import LoaderSnapshot
from tests.observe.conftest import Speaker, lane, stats
from tests.support.concurrency import said_by_a_child
from tests.support.leaks import check_scenario, open_links
from tests.support.programs import kept_free

pytestmark = pytest.mark.usefixtures("no_leaks", "runtime")
NUMBERS: Any = range(32)
Sample = tuple[str, frozenset[tuple[str, str]]]


def _loader(**more: Any) -> Any:
    return DataLoader(NUMBERS, 4, **{"num_workers": 1, "worker_kind": "thread", "metrics_port": 0, **more})


def _address(loader: Any) -> tuple[str, int]:
    host, _, port = loader.stats()["metrics"].rpartition(":")
    return host, int(port)


def _scrape(address: tuple[str, int]) -> dict[Sample, float]:
    connection = HTTPConnection(*address, timeout=10.0)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == 200, text
    return _values(text_string_to_metric_families(text))


def _values(families: Any) -> dict[Sample, float]:
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def _of(found: dict[Sample, float], name: str, **labels: str) -> float:
    return found[f"minato_{name}", frozenset(labels.items())]


@pytest.mark.parametrize("workers", [0, 1])
def test_counters_of_epochs_add_up(workers: int) -> None:
    loader = _loader(num_workers=workers, **({} if workers else {"worker_kind": "auto"}))
    assert list(loader)
    address, said = _address(loader), []
    for _ in range(3):
        said.append(_scrape(address))
        iterator = iter(loader)
        said.append(_scrape(address))
        next(iterator)
        said.append(_scrape(address))
        assert len(list(iterator)) == 7
    delivered = [_of(one, "samples_total", loader="range-1") for one in said]
    assert delivered == [32, 32, 36, 64, 64, 68, 96, 96, 100]
    assert [_of(one, "epoch", loader="range-1") for one in said] == [0, 1, 1, 1, 2, 2, 2, 3, 3]
    for earlier, later in itertools.pairwise(said):
        fallen = {key for key, value in earlier.items() if key[0].endswith("_total") and later[key] < value}
        assert not fallen
    last = said[-1]
    assert _of(last, "epoch_expected_samples", loader="range-1") == 32
    assert _of(last, "lane_slots", loader="range-1", lane="cpu") == 1
    assert _of(last, "lane_service_seconds", loader="range-1", lane="cpu", quantile="0.99") > 0
    waited = sum(value for (name, _), value in last.items() if name == "minato_wait_seconds_total")
    assert 0 < waited <= _of(last, "epoch_seconds_total", loader="range-1")


def test_loaders_share_a_server_while_one_of_them_lives(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first, second, never = _loader(), _loader(), _loader()
    list(first)
    list(second)
    assert _address(first) == _address(second)
    assert "are at http://{}:{}/metrics".format(*_address(first)) in caplog.text
    found = _scrape(_address(first))
    assert {dict(labels)["loader"] for _, labels in found} == {"range-1", "range-2"}
    address = _address(first)
    del first
    assert {dict(labels)["loader"] for _, labels in _scrape(address)} == {"range-2"}
    del second
    assert _scrape(address) == {}
    del never
    with pytest.raises(ConnectionRefusedError):
        _scrape(address)


def test_a_port_of_ones_own_and_one_that_cannot_be_had() -> None:
    with kept_free("0.0.0.0") as port:
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(ValueError, match=f"metrics_port: 127.0.0.1:{port} is in use, by another rank, say; pass"),
        ):
            _loader(metrics_port=port)
        loader = _loader(metrics_port=f"0.0.0.0:{port}")
        list(loader)
        assert loader.stats()["metrics"] == f"0.0.0.0:{port}"
        assert _of(_scrape(("127.0.0.1", port)), "samples_total", loader="range-1") == 32
    with pytest.raises(ValueError, match=r"metrics_port: 192\.0\.2\.1:0 cannot be had"):
        _loader(metrics_port="192.0.2.1:0")


def test_without_the_client_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("prometheus_client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ModuleNotFoundError, match=r"comes with pip install 'minato-gpu\[metrics\]'"):
        _loader()
    assert "metrics" not in _loader(metrics_port=None).__dict__


def _scraped() -> None:
    loader = _loader(persistent_workers=True)
    list(loader)
    assert _scrape(_address(loader))


def _asked_nothing() -> None:
    """Somebody who connects, and hangs up when the loader is gone."""
    loader = _loader()
    list(loader)
    with socket.create_connection(_address(loader)):
        assert _scrape(_address(loader))
        del loader


@pytest.mark.parametrize("scenario", [_scraped, _asked_nothing])
def test_nothing_stays_behind(scenario: Callable[[], None]) -> None:
    check_scenario(scenario)


def _listening(port: int) -> str:
    """The socket that listens there, as a descriptor's link names it."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    (inode,) = [one[9] for one in lines if one[1].endswith(f":{port:04X}") and one[3] == "0A"]
    return f"socket:[{inode}]"


def test_copies_and_forked_processes_export_nothing() -> None:
    loader = _loader()
    list(loader)
    other = copy.copy(loader)
    list(other)
    address = _address(loader)
    assert {dict(labels)["loader"] for _, labels in _scrape(address)} == {"range-1"}

    kept = [loader]

    socket_of_parent = _listening(address[1])

    def child() -> list[Any]:
        list(kept[0])
        held = socket_of_parent in open_links()
        return ["metrics" in kept[0].stats(), len(list(_loader(metrics_port=None))), held]

    assert said_by_a_child(child) == [False, 8, False]
    assert _of(_scrape(address), "samples_total", loader="range-1") == 32
    kept.clear()
    del loader
    with pytest.raises(ConnectionRefusedError):  # the forked process did not keep it, nor does the copy
        _scrape(address)


# --- the collector alone --------------------------------------------------------------------------------------------


def _collected(speaker: Speaker) -> dict[Sample, float]:
    return _values(LoaderCollector(lambda: [("a-1", speaker)]).collect())


def test_every_metric() -> None:
    said = stats(
        100,
        samples_failed=2,
        workers={"died": 1, "hung": 2, "replaced": 3},
        stalls={"fetch": {"count": 4, "seconds": 1.5}},
        wait_s={"total": 2.0},
        reads={"reads": 7, "bytes": 700, "failed": 1, "by_workers": 2},
        cache={"memory": {"hits": 3, "misses": 1, "bytes": 300}, "disk": {"hits": 5, "misses": 2, "nbytes": 500}},
    )
    found = _collected(Speaker(LoaderSnapshot(4, said, {("samples", ""): 1000.0, ("wait_seconds", "budget"): 3.0})))
    a = {"loader": "a-1"}
    assert _of(found, "samples_total", **a) == 1100 and _of(found, "samples_failed_total", **a) == 2
    assert _of(found, "wait_seconds_total", **a, cause="fetch") == 1.5
    assert _of(found, "wait_seconds_total", **a, cause="budget") == 3.0
    assert _of(found, "wait_seconds_total", **a, cause="other") == 0.5
    assert _of(found, "stalls_total", **a, cause="fetch") == 4
    assert _of(found, "workers_total", **a, event="replaced") == 3
    assert _of(found, "reads_total", **a) == 7 and _of(found, "read_bytes_total", **a) == 700
    assert _of(found, "cache_hits_total", **a, tier="disk") == 5 and _of(found, "cache_bytes", **a, tier="disk") == 500
    assert _of(found, "cache_bytes", **a, tier="memory") == 300
    assert _of(found, "in_flight_bytes", **a) == 12_000 and _of(found, "in_flight_peak_bytes", **a) == 34_000_000
    assert _of(found, "lane_queue_seconds", **a, lane="cpu", quantile="0.5") == 0.25
    assert _collected(Speaker()) == {}


def test_a_counter_that_is_derived_does_not_fall_by_its_last_digit() -> None:
    speaker = Speaker()
    collector = LoaderCollector(lambda: [("a-1", speaker)])
    told = []
    for elapsed in (1.1, 1.3, 1.7, 3.3, 7.9, 9.7):  # a lane that has been busy for 0.1 seconds all the time
        speaker.says = LoaderSnapshot(0, stats(elapsed=elapsed, lanes={"cpu": lane(1, 0.1 / (elapsed * 2), 2)}), {})
        (family,) = [one for one in collector.collect() if one.name == "minato_lane_busy_seconds"]
        told.append(family.samples[0].value)
    assert told == sorted(told) and math.isclose(told[0], told[-1])
    speaker.says = LoaderSnapshot(0, stats(lanes={"cpu": lane(1, 0.0, 2)}), {})
    (family,) = [one for one in collector.collect() if one.name == "minato_lane_busy_seconds"]
    assert family.samples[0].value == told[-1]


# --- metrics_port ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (True, TypeError, "metrics_port must be a port, a text or None, got True"),
        (-1, ValueError, "metrics_port=-1: a port is a number from 0"),
        (65536, ValueError, "to 65535"),
        ("9090", ValueError, "is no host and port"),
        ("host:²", ValueError, "is no host and port"),
        ("::1:9090", ValueError, r"or '\[::1\]:9090'"),
    ],
)
def test_what_is_none(given: Any, kind: type[Exception], said: str) -> None:
    data: Any = range(3)
    with pytest.raises(kind, match=said):
        DataLoader(data, metrics_port=given)
