"""The fake device's own checks, on which the tests of every lane and load rely."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fake_device import FakeDevice


@pytest.mark.parametrize("use", ["event", "empty", "copy"])
def test_the_fake_device_keeps_its_consumers_stream_from_the_loaders_threads(use: str) -> None:
    device, caught = FakeDevice(), list[BaseException]()
    acts: dict[str, Callable[[], Any]] = {
        "event": device.event,
        "empty": lambda: device.empty(8),
        "copy": lambda: device.copy(torch.zeros(2), torch.ones(2)),
    }

    def act() -> None:
        try:
            acts[use]()
        except AssertionError as error:
            caught.append(error)

    for name in ("minato-device", "somebody"):
        thread = threading.Thread(target=act, name=name)
        thread.start()
        thread.join()
    assert len(caught) == 1
