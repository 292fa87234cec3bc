"""What DALI's errors say, in words alone: which operator failed, and which sample.

Decision: a graph is used again after an error of one of its operators, although DALI then calls it "no longer valid".
With ``exec_dynamic`` an error belongs to one run: it reaches the outputs after every operator before them has ended, so
all inputs of that run are gone, and the next run meets its own (``executor2/exec_node_task.cc``, ``OpTask::Run``; the
tests run some hundred broken batches between whole ones). Where the inputs themselves failed that is not so: one of
them may lie in its queue still, and would come to the next run's samples.
"""

from __future__ import annotations

import re

_OPERATOR = re.compile(r"Error in \w+ operator `([^`]+)`")
_SAMPLE = re.compile(r"Failed to decode sample #(\d+)")


def leaves_graph_usable(error: BaseException) -> bool:
    """Whether one of the graph's operators failed, none of those that take its inputs."""
    found = _OPERATOR.search(str(error)) if isinstance(error, RuntimeError) else None
    return found is not None and "external" not in found[1].lower()


def sample_of(error: BaseException) -> int | None:
    """The number, in its micro-batch, of the sample that a decoder could not decode; None where none is named."""
    found = _SAMPLE.search(str(error)) if isinstance(error, RuntimeError) else None
    return None if found is None else int(found[1])
