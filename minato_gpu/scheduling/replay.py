"""Event logs: the scheduler's events and instructions, one JSON line per event, and their replay.

The scheduler is a function of its events, so a log recorded in production replays to the same instructions: to explain
a decision, to test a change of policy on real traffic, or to reproduce a fault. The caller reads and writes the files.
The first line, and that of every further run in the log, holds the policy; every other line holds an event and the
instructions that followed:

    {"policy": {"window": 256, ...}}
    {"event": ["Finished", {"time": 1.5, "chunk": 7, ...}], "instructions": [["Dispatch", {...}], ...]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields

from minato_gpu.samples import JSON, Value
from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling.plans import Plan
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler

_KINDS: dict[str, type] = {kind.__name__: kind for kind in (*m.Event.__args__, *m.Instruction.__args__)}


class ReplayMismatch(Exception):
    """Raised when the scheduler's instructions differ from the log's."""


def header(policy: Policy) -> str:
    """Returns the first line of a log."""
    return json.dumps({"policy": asdict(policy)})


def line(event: m.Event, instructions: Sequence[m.Instruction]) -> str:
    """Returns the line of a log for one event."""
    return json.dumps({"event": _encode(event), "instructions": [_encode(each) for each in instructions]})


def parse(text: str) -> tuple[m.Event, list[m.Instruction]]:
    """Returns the event and the instructions of a line. Raises ValueError for a line that is not one of a log."""
    try:
        entry = json.loads(text)
        return _decode(entry["event"]), [_decode(each) for each in entry["instructions"]]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"not a line of an event log: {text[:80]!r}") from error


def parse_header(text: str) -> Policy:
    """Returns the policy of a log's first line. Raises ValueError for any other line."""
    try:
        return Policy(**json.loads(text)["policy"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"not the first line of an event log: {text[:80]!r}") from error


def verify(lines: Iterable[str]) -> int:
    """Replays a whole log (header first) and returns its number of events.

    Raises ReplayMismatch at the first event to which the scheduler now answers differently, ValueError for bad lines.
    """
    rest = iter(lines)
    scheduler = Scheduler(parse_header(next(rest, "")))
    count = 0
    for text in rest:
        if text.startswith('{"policy"'):  # another run of the same loader
            scheduler = Scheduler(parse_header(text))
            continue
        event, recorded = parse(text)
        said = scheduler.handle(event)
        count += 1
        if said != recorded:
            raise ReplayMismatch(f"event {count} ({type(event).__name__}): recorded {recorded}, now {said}")
    return count


def _encode(message: m.Event | m.Instruction | m.Chunk) -> list[JSON]:
    return [type(message).__name__, {field.name: _plain(getattr(message, field.name)) for field in fields(message)}]


def _plain(value: Value) -> JSON:
    if isinstance(value, m.Chunk):
        return _encode(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        return value.tolist()
    return [_plain(each) for each in value]


def _decode(entry: JSON) -> Value:
    name, values = entry
    kind = m.Chunk if name == "Chunk" else _KINDS[name]
    return kind(**{key: _restore(key, value) for key, value in values.items()})


def _restore(key: str, value: JSON) -> Value:
    if key == "chunk" and isinstance(value, list):
        return _decode(value)
    if key == "known" and value is not None:
        return m.LaneCosts(*value)
    if key == "between" and value is not None:
        return [[Plan(*plan) for plan in plans] for plans in value]
    return tuple(_restore("", each) for each in value) if isinstance(value, list) else value
