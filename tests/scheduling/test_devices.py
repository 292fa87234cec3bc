"""Several device lanes: who gets what next, and that one that is not there yet keeps nobody from going on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from minato_gpu.samples import SourceBatch, TicketId
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.interference import AFTER_WAIT, LEARNED, DeviceInterference
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler
from tests.scheduling.model import Shell

BATCH, DEVICES = 8, 4
COST_S = 4e-3


def policy(**changes: Any) -> Policy:
    """Devices that prepare everything, in any order."""
    usual: dict[str, Any] = {"fixed": False, "max_lateness": 3, "device_s": 0.1, "device_ahead": 2, "micro_batch": 4}
    return Policy(**{"window": 3 * BATCH * DEVICES, "cpu_runs": False, "devices": DEVICES, **usual, **changes})


def opened(shell: Shell, devices: int = DEVICES) -> Shell:
    for number in range(devices):
        shell.open(f"device:{number}", 1)
    return shell


def test_devices_are_served_in_rounds_so_that_none_starves() -> None:
    """What is there is for all of them; the first does not fill its queue before the last has begun."""
    shell = opened(Shell(policy()))
    for _ in range(2):
        shell.admit(BATCH, 0, [COST_S] * BATCH, [COST_S] * BATCH)
    assert Counter(chunk.lane for chunk in shell.held.values()) == {f"device:{n}": 1 for n in range(DEVICES)}
    for _ in range(2):
        shell.admit(BATCH, 0, [COST_S] * BATCH, [COST_S] * BATCH)
    assert Counter(chunk.lane for chunk in shell.held.values()) == {f"device:{n}": 2 for n in range(DEVICES)}


def test_the_least_loaded_device_is_served_first() -> None:
    shell = opened(Shell(policy()), 2)
    shell.admit(BATCH, 0, [COST_S] * BATCH, [COST_S] * BATCH)
    busy, idle = sorted(shell.held)
    assert [shell.held[number].lane for number in (busy, idle)] == ["device:0", "device:1"]
    shell.finish(idle, 4)
    shell.admit(4, 0, [COST_S] * 4, [COST_S] * 4)
    assert [chunk.lane for number, chunk in shell.held.items() if number > idle] == ["device:1"]


@pytest.mark.parametrize("home", ["device:0", "device:1"])
def test_reading_goes_on_while_a_device_is_not_there_yet(home: str) -> None:
    """Its samples wait for it on their own side: whoever only reads finds the next that is to be read."""
    scheduler = Scheduler(policy(fixed=True, max_lateness=0, devices=2, inspect=True))
    todo: list[m.Event] = [m.LaneOpened(0.0, m.CPU, 1), m.LaneOpened(0.0, home, 1, m.DEVICE)]
    places = [(SourceBatch(at), 0, TicketId(at * BATCH), BATCH) for at in range(8)]
    todo += [m.Admitted(0.0, *place, home=f"device:{place[0] % 2}") for place in places]
    read: set[int] = set()
    made: dict[int, str] = {}
    for event in todo:
        for said in scheduler.handle(event):
            if not isinstance(said, m.Dispatch):
                continue
            chunk, costs = said.chunk, [COST_S] * said.chunk.size
            serials = {serial for lo, hi in chunk.spans for serial in range(lo, hi)}
            if chunk.kind == "inspect":
                read |= serials
                todo.append(m.Inspected(0.0, chunk.number, costs, costs))
            else:
                made.update(dict.fromkeys(serials, chunk.lane))
                todo.append(m.Finished(0.0, chunk.number, chunk.size, 0.01))
    assert read == set(range(8 * BATCH))
    assert made == {serial: home for serial in read if f"device:{serial // BATCH % 2}" == home}
    other = "device:1" if home == "device:0" else "device:0"
    then = scheduler.handle(m.LaneOpened(1.0, other, 1, m.DEVICE))
    assert {each.chunk.lane for each in then if isinstance(each, m.Dispatch)} == {other}


def test_patience_after_a_wait_counts_rounds_of_batches() -> None:
    harm = DeviceInterference(True, devices=DEVICES)
    for _ in range(LEARNED * DEVICES):
        harm.stepped(0.1, 0.01)
    assert harm.spare
    harm.waited()
    for _ in range(AFTER_WAIT * DEVICES - 1):
        harm.stepped(0.1, 0.01)
        assert not harm.spare
    harm.stepped(0.1, 0.01)
    assert harm.spare


def test_tickets_have_homes_of_their_own_only_in_strict_order() -> None:
    lanes = tuple(f"device:{number}" for number in range(DEVICES))
    assert policy(fixed=True, max_lateness=0).homes == lanes == policy().device_lanes
    for more in ({"fixed": True, "max_lateness": 2}, {"fixed": False, "max_lateness": 2}):
        assert policy(**more).homes == (m.DEVICE,)
    assert policy(fixed=True, max_lateness=0, devices=1).homes == (m.DEVICE,)
