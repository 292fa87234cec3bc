"""Who waits for a device: threads of the loader's own, and never the one that trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.devices.several import Machine, check_content, consume, loader_on, on_host
from tests.memory.bench import ORDERS
from tests.support.fake_device import FakeDevice, Order


def _noting(loader: Any, device: FakeDevice, waited: list[tuple[str, str]]) -> Iterator[Any]:
    """The batches; who has waited until the last was handed over."""
    for batch in loader:
        waited[:] = device.waited
        yield batch


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lanes", [["cpu"], ["device"], ["cpu", "device"]], ids="+".join)
def test_the_thread_that_trains_does_not(machine: Machine, order: Order, lanes: list[str]) -> None:
    (device,) = machine(1, order)
    waited: list[tuple[str, str]] = []
    check_content(consume([device], _noting(loader_on([device], lanes=lanes), device, waited)), on_host())
    assert [who for who in waited if not who[0].startswith("minato-")] == []
