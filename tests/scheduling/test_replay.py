"""A recorded run replays to the same instructions, and a changed policy is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minato_gpu.scheduling import messages as m
from minato_gpu.scheduling import replay
from minato_gpu.scheduling.policy import Policy
from minato_gpu.scheduling.scheduler import Scheduler
from minato_gpu.simulation.catalogue import SCENARIOS
from minato_gpu.simulation.virtual import VirtualLoader


@pytest.mark.parametrize("fixed", [True, False])
def test_a_recorded_run_replays_to_the_same_instructions(fixed: bool) -> None:
    work = replace(SCENARIOS["hybrid"], epoch_samples=(200,)).work(0, 0.3)
    policy = Policy(window=256, fixed=fixed, max_lateness=0 if fixed else 8, budget_bytes=200_000)
    loader = VirtualLoader(work, policy)
    lines = [replay.header(policy)]
    handle = loader.scheduler.handle

    def record(event: m.Event) -> list[m.Instruction]:
        said = handle(event)
        lines.append(replay.line(event, said))
        return said

    loader.scheduler.handle = record  # type: ignore[method-assign]
    loader.run()
    assert replay.verify(lines) == len(lines) - 1
    events, again = [replay.parse(text)[0] for text in lines[1:]], Scheduler(policy)
    assert [replay.line(event, again.handle(event)) for event in events] == lines[1:]

    changed = [replay.header(replace(policy, chunk_s=0.5, micro_batch=1)), *lines[1:]]
    with pytest.raises(replay.ReplayMismatch, match="event"):
        replay.verify(changed)


@pytest.mark.parametrize("text", ['{"event": 3}', "[]", '{"policy": {}}', '{"event": ["Fin'])
def test_a_line_that_is_no_event_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="event log"):
        replay.parse(text)
