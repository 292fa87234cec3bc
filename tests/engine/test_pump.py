"""What a run that was given up still tells, and what becomes of reports where one of them raises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from minato_gpu import DataLoader
from minato_gpu.engine.parts import Parts
from minato_gpu.engine.pump import Pump
from minato_gpu.engine.run import Sent
from minato_gpu.lanes.base import Report
from minato_gpu.lanes.contract import Opened
from minato_gpu.lanes.worker_channels import WorkerChannels
from minato_gpu.samples import TicketId
from minato_gpu.scheduling.messages import Awaited, Chunk
from minato_gpu.window.records import Record, Window
from tests.lanes.harness import open_links
from tests.support.tickets import positions, span
from tests.support.waiting import wait_until


def _told(reports: list[Report], learn: Callable[[bytes], None]) -> Pump:
    """A pump that has gone on to another run than that of the reports, which have arrived."""

    def receive() -> list[Report]:
        arrived, reports[:] = reports[:], []
        return arrived

    assembly: Any = SimpleNamespace(holdings=None, loading=None, samples=SimpleNamespace(learn=learn))
    scheduler: Any = SimpleNamespace(awaited=None, lane_costs={})
    links: Any = SimpleNamespace(bell=None, completions=None)
    lane: Any = SimpleNamespace(name="cpu", receive=receive)
    pump = Pump(Parts(links, {"cpu": lane}, assembly, lambda: scheduler))
    pump.run.number = 1
    return pump


def _report(layout: bytes, run: int = 0) -> Report:
    return Report(run, 3, 0, 0, 1, 0.0, 0.0, 0.0, True, layout=layout)


def test_a_layout_that_was_found_is_not_lost_with_its_run() -> None:
    """A worker that has described a sample does not do so again."""
    learned: list[bytes] = []
    _told([_report(b"found")], learned.append).receive()
    assert learned == [b"found"]


def test_a_layout_that_comes_after_the_marks_of_its_samples_is_learned() -> None:
    """Marks are told by shared memory, and may be there before the message; its lease is done with by then."""
    learned: list[bytes] = []
    pump = _told([_report(b"late", run=1)._replace(done=0, final=False)], learned.append)
    pump.receive()
    assert learned == [b"late"]


def test_a_layout_that_comes_after_some_marks_of_its_lease_takes_nothing_back() -> None:
    """Samples that were told of would be told of once more, or be prepared again if the worker died."""
    learned: list[bytes] = []
    pump = _told([_report(b"late", run=1)._replace(done=0, final=False)], learned.append)
    sent = pump.run.sent[3] = Sent(Chunk(3, "cpu", "run", (span(0, 2),), 0.0), 0, 0.0)
    sent.done = 1
    pump.receive()
    assert learned == [b"late"] and sent.done == 1


def test_a_lane_has_loaded_its_libraries_once_and_replacements_open_more_slots() -> None:
    """What is to come before their clean-up at the interpreter's end is registered then, not with each replacement."""
    told: list[Any] = [Opened(2), Opened(1)]
    pump, opened = _told(told, lambda _: None), list[str]()
    pump.on_open = lambda: opened.append("once")
    pump.run.number = 0  # no epoch has begun
    pump.receive()
    assert (told, opened, pump._slots) == ([], ["once"], {"cpu": 3})


def test_reports_after_one_that_raises_are_taken_in_later() -> None:
    learned: list[bytes] = []

    def learn(layout: bytes) -> None:
        learned.append(layout)
        if layout == b"bad":
            raise KeyError(layout)

    pump = _told([_report(b"bad"), _report(b"good")], learn)
    with pytest.raises(KeyError):
        pump.receive()
    pump.receive()
    assert learned == [b"bad", b"good"]


def test_a_run_that_is_given_up_leaves_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would count as those that the next run waits for."""
    learned: list[bytes] = []
    reports = [_report(b"found")._replace(final=False)]
    pump = _told(reports, learned.append)
    monkeypatch.setattr(pump.assembly, "clear", lambda: ([], []), raising=False)
    monkeypatch.setattr(pump, "_abandoned", SimpleNamespace(add=lambda chunks, blocks, slabs: None))
    for command in ("recall", "look"):
        monkeypatch.setattr(pump.lanes["cpu"], command, list, raising=False)
    pump.new_run()
    assert learned == [b"found"] and not reports


def _waits(links: WorkerChannels, monkeypatch: pytest.MonkeyPatch, *, marks: int, exactly: bool) -> Pump:
    """A pump whose consumer waits for a sample of a place of four, with these marks."""
    pump = _told([], lambda layout: None)
    pump.bell, pump.completions = links.bell, links.completions
    monkeypatch.setattr(pump.lanes["cpu"], "sleep", lambda *, every_task: None, raising=False)
    record = Record(0, TicketId(0), positions(0, 4), [0, 1, 2, 3], None)
    record.marks = marks
    pump.assembly.window = Window()
    pump.assembly.window.admit(record)
    pump.run.scheduler.awaited = Awaited(span(0, 4), 1, exactly)  # type: ignore[misc]
    return pump


def test_what_messages_tell_is_not_waited_for_by_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place without marks is told by messages alone: those of others never complete it."""
    with open_links() as links:
        pump = _waits(links, monkeypatch, marks=-1, exactly=True)
        links.bell.publish(links.completions.reserve(4), [1e-3] * 4, 0.0, 4e-3, 0, None)
        pump.receive()
        assert not pump.listen()


def test_the_consumer_sleeps_where_what_is_ready_cannot_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks of other places may be ready, of leases that nobody asks for; one more that gets ready wakes it."""
    with open_links() as links:
        own, others = links.completions.reserve(4), links.completions.reserve(4)
        pump = _waits(links, monkeypatch, marks=own, exactly=False)
        links.bell.publish(others, [1e-3] * 2, 0.0, 2e-3, 0, None)
        pump.receive()
        assert not pump.listen()
        links.bell.publish(own, [1e-3], 0.0, 1e-3, 0, None)
        assert pump.listen()


class _Gated:
    """Numbers, of which one waits."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, key: int) -> int:
        assert key != 30 or self.gate.wait(30)
        return key


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is asked whether that lives
def test_what_the_pump_thread_raises_is_kept_for_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    gated: Any = _Gated()
    loader: Any = DataLoader(gated, 4, num_workers=1, worker_kind="thread")
    iterator = iter(loader)
    got = next(iterator).tolist()
    engine, raised = iterator._engine, []

    def receive() -> None:
        raised.append(OSError("cannot be taken in"))
        raise raised[-1]

    with monkeypatch.context() as patch:
        patch.setattr(engine.pump, "receive", receive)
        engine._leave_due()
        assert wait_until(lambda: raised)
        with engine._lock:
            pass  # it has been kept
    assert engine._thread.is_alive()
    with pytest.raises(OSError, match="cannot be taken in"):  # at the latest where it must wait
        got.extend(key for batch in iterator for key in batch.tolist())
    gated.gate.set()
    got += [key for batch in iterator for key in batch.tolist()]
    assert got == list(range(40))
