"""Reading a trace back, and what must hold of every one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Slice:
    """Something that lasted; times in nanoseconds."""

    name: str
    begin: int
    end: int
    values: dict[str, float]
    flows: list[int]


@dataclass
class Found:
    """By name of their track; ``counts``: the values of the counter, in order of time."""

    slices: dict[str, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    instants: dict[str, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    counts: list[int] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    @property
    def work(self) -> list[Slice]:
        """What slots prepared; not what they read for another lane, nor the batches that they joined."""
        slices = [each for slices in self.slices.values() for each in slices]
        return [each for each in slices if each.name in ("sample", "samples")]

    @property
    def batches(self) -> list[Slice]:
        """As the training loop got them: its steps."""
        return [each for each in self.slices["training loop"] if each.name == "step"]


def _schema() -> Any:
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2

    return perfetto_trace_pb2


def read(path: Path) -> Found:
    """What a trace says. Raises AssertionError where it is none: see there."""
    trace = _schema().Trace()
    trace.ParseFromString(path.read_bytes())
    tracks: dict[int, str] = {}
    events: list[tuple[int, int, Any]] = []
    for number, packet in enumerate(trace.packet):
        assert not _unknown(packet), "a field that the schema does not have"
        assert packet.trusted_packet_sequence_id == 1, "a packet of nobody"
        if packet.HasField("track_descriptor"):
            described = packet.track_descriptor
            assert described.uuid not in tracks, "a track is described twice"
            assert described.parent_uuid in tracks or described.HasField("process"), "a track hangs nowhere"
            tracks[described.uuid] = described.name
        elif packet.HasField("track_event"):
            assert packet.track_event.track_uuid in tracks, "an event on a track that is not described before"
            events.append((packet.timestamp, number, packet.track_event))
        else:
            assert number == 0 and packet.clock_snapshot.primary_trace_clock == 3
    events.sort(key=lambda event: event[:2])  # as Perfetto does
    return _found(events, tracks)


def _found(events: list[tuple[int, int, Any]], tracks: dict[int, str]) -> Found:
    found = Found()
    under_way: dict[int, list[Slice]] = defaultdict(list)
    kinds = _schema().TrackEvent
    for at, _, event in events:
        track, values = tracks[event.track_uuid], {each.name: _value(each) for each in event.debug_annotations}
        found.counts += event.extra_counter_values
        if event.type == kinds.TYPE_INSTANT:
            found.instants[track].append(Slice(event.name, at, at, values, list(event.flow_ids)))
        elif event.type == kinds.TYPE_SLICE_BEGIN:
            under_way[event.track_uuid].append(Slice(event.name, at, at, values, list(event.flow_ids)))
        else:
            assert event.type == kinds.TYPE_SLICE_END and under_way[event.track_uuid], "an end without a beginning"
            done = under_way[event.track_uuid].pop()
            done.end = at
            found.slices[track].append(done)
    found.open = [each.name for stack in under_way.values() for each in stack]
    return found


def _value(annotation: Any) -> float:
    return float(getattr(annotation, annotation.WhichOneof("value")))


def _unknown(message: Any) -> bool:
    from google.protobuf.unknown_fields import UnknownFieldSet

    if len(UnknownFieldSet(message)):
        return True
    parts = [value for kind, value in message.ListFields() if kind.message_type is not None]
    return any(_unknown(each) for part in parts for each in ([part] if hasattr(part, "ListFields") else part))
