"""A DALI graph on a GPU that computes late: nothing waits for it, and nothing is let go of while it is read."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from minato_gpu.device import dali_graph, nvjpeg
from minato_gpu.device.dali_graph import DaliGraph
from minato_gpu.pipeline.pipeline import DaliFragment, Field, Pipeline, Stage
from tests.support.fake_dali import FakeDali
from tests.support.fake_device import LAZY_CONSUMER, LAZY_COPIES, FakeDevice, Order

ORDERS: list[Order] = [LAZY_COPIES, LAZY_CONSUMER, *range(6)]
ROW = Field(np.float32, (None,))
RAGGED, DENSE = (3, 1, 4), (2, 2, 2)


def unused(*_: Any) -> Any:
    raise AssertionError("not on the CPU lane")


def add(dali: Any, fields: Any, params: Any, device: str) -> Any:
    return {"row": fields["row"] + params["amount"]}


def samples(value: int, lengths: tuple[int, ...] = RAGGED) -> tuple[list[Any], list[Any]]:
    """Fields and parameters of a micro-batch."""
    batch = [{"row": np.full(length, value, np.float32)} for length in lengths]
    return batch, [{0: {"amount": np.float32(n)}} for n in range(len(lengths))]


class Bench:
    """One graph on one device. ``run`` issues a micro-batch whose samples are all ``value``."""

    def __init__(self, order: Order) -> None:
        self.device = FakeDevice(order)
        self.dali = FakeDali(self.device)
        stage = Stage("add", ("row",), {"row": ROW}, unused, DaliFragment(add), lambda rng, meta: {"amount": 1})
        pipeline = Pipeline((stage,), outputs=("row",), inputs={"row": ROW})
        self.graph = DaliGraph(pipeline, range(1), device="cuda:0", max_batch=8, threads=1)
        self.graph.stream = self.stream = self.device.stream()

    def run(self, value: int, lengths: tuple[int, ...] = RAGGED) -> tuple[list[Any], Any]:
        """The samples, and the event behind them; nobody else holds what was fed."""
        return self.run_samples(*samples(value, lengths))

    def run_samples(self, batch: Any, drawn: Any) -> tuple[list[Any], Any]:
        """The same of given ones."""
        with self.device.running(self.graph.stream):
            found = self.graph.run(batch, drawn)
            return [fields["row"] for fields in found], self.device.event()

    def look_ahead(self, *coming: Any) -> list[bool]:
        """Have each of these micro-batches scheduled ahead, once, as those before them are run; whether they were."""
        left, begun = list(coming), list[bool]()

        def scheduled() -> None:
            if left:
                begun.append(self.graph.ahead(*left.pop(0)))

        self.graph.at.scheduled = scheduled
        return begun

    def read(self, rows: list[Any], event: Any) -> list[Any]:
        """What the consumer reads, which waits for the event on its stream and not on the host."""
        found: list[Any] = []
        with self.device.running(self.device.consumer):
            self.device.wait(event)
        self.device.kernel(lambda: found.extend(row.tolist() for row in rows))
        self.device.finish()
        return found


@pytest.fixture
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    one = Bench(getattr(request, "param", LAZY_COPIES))
    one.dali.install(monkeypatch)
    yield one
    one.graph.close()


def wanted(value: int, lengths: tuple[int, ...] = RAGGED) -> list[Any]:
    return [[float(value + n)] * length for n, length in enumerate(lengths)]


@pytest.mark.parametrize("bench", ORDERS, indirect=True)
@pytest.mark.parametrize("lengths", [RAGGED, DENSE])
def test_in_every_order_that_events_allow_each_sample_is_its_own(bench: Bench, lengths: tuple[int, ...]) -> None:
    runs = [(value, *bench.run(value, lengths)) for value in (10, 20, 30)]
    gc.collect()
    assert bench.device.waited == []
    assert [bench.read(rows, event) for _, rows, event in runs] == [wanted(value, lengths) for value, _, _ in runs]
    assert bench.dali.gone == 0


def test_a_micro_batch_that_fails_runs_again_behind_the_one_that_was_scheduled_ahead(bench: Bench) -> None:
    bench.run(0)
    (first, second), bench.dali.fails = (samples(10), samples(20)), ["Error in MIXED operator"]
    bench.look_ahead(second)
    with pytest.raises(RuntimeError, match="MIXED"):
        bench.run_samples(*first)
    again = bench.run_samples(*first)
    after = bench.run_samples(*second)
    assert bench.graph.runs == 4
    assert [bench.read(*run) for run in (again, after)] == [wanted(10), wanted(20)]


def test_what_was_scheduled_ahead_and_is_not_wanted_is_no_others(bench: Bench) -> None:
    bench.run(0)
    bench.look_ahead(samples(20))
    run = bench.run(10)
    bench.graph.forget()
    assert [bench.read(*one) for one in (run, bench.run(30))] == [wanted(10), wanted(30)]


@pytest.mark.parametrize(
    ("operators", "engine_load", "waits", "idle"),
    [
        (b"decoders__Image", None, None, True),
        (b"decoders__Image", "0", None, False),
        (b"decoders__ImageSlice", "0.9", "0", False),
        (b"decoders__ImageSlice", "0", "1", True),
        (b"ImageDecoder", "0.9", None, True),
        (b"Resize decoders__Audio", "0.9", "1", False),
        (None, "0.9", None, True),  # one with functions of Python's cannot be serialized
    ],
)
def test_the_host_waits_before_each_decoding_run_where_the_engine_may_write_early(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    operators: bytes | None,
    engine_load: str | None,
    waits: str | None,
    idle: bool,
) -> None:
    for name, value in ((nvjpeg.ENGINE_LOAD, engine_load), (nvjpeg.WAITS, waits)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(dali_graph, "await_stream", lambda stream: stream.record_event().synchronize())
    bench.dali.operators = operators
    runs = [(value, *bench.run(value)) for value in (10, 20, 30)]
    assert [left == 0 for left in bench.dali.runs] == [True, idle, idle]
    assert [bench.read(rows, event) for _, rows, event in runs] == [wanted(value) for value, _, _ in runs]


def test_outputs_are_let_go_of_by_the_lanes_thread_once_they_are_copied(bench: Bench) -> None:
    """Not by that which drops the last batch that they have gone into."""
    rows, event = bench.run(10)
    bench.graph.sweep()
    assert bench.dali.released == [], "the copies have not run"
    assert bench.read(rows, event) == wanted(10)
    held = [rows]
    rows = []
    consumer = threading.Thread(target=held.clear, name="consumer")
    consumer.start()
    consumer.join()
    assert bench.dali.released == []
    lane = threading.Thread(target=bench.graph.sweep, name="lane")
    lane.start()
    lane.join()
    assert bench.dali.released == ["lane"] and bench.device.waited == []


def test_the_inputs_of_a_run_that_failed_stay_until_a_later_one_is_through(bench: Bench) -> None:
    """Copies to the device may be under way when DALI tells of the error."""
    bench.run(10)
    bench.device.finish()
    bench.dali.fails = ["Error in GPU operator `fn.slice` encountered: something"]
    with pytest.raises(RuntimeError, match="something"):
        bench.run(20)
    assert len(bench.graph._held) == 1
    rows, event = bench.run(30)
    assert bench.read(rows, event) == wanted(30)
    bench.graph.sweep()
    assert len(bench.graph._held) == 0
    assert bench.dali.held == [("build", 0)], "the graph has outlived the error"
