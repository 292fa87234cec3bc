"""Reads DALI's error texts: which operator failed, and which sample of the micro-batch.

Decision: a graph is used again after an error of one of its operators, although DALI then calls it "no longer valid".
With ``exec_dynamic`` an error belongs to one run: it reaches the outputs after all operators before them have ended, so
that run's inputs are consumed and the next run gets its own (``executor2/exec_node_task.cc``, ``OpTask::Run``; the
tests run some hundred broken batches between whole ones). An error of an input operator is different: an input may
still be queued, and would be given to the next run.
"""

from __future__ import annotations

import re

_OPERATOR = re.compile(r"Error in \w+ operator `([^`]+)`")
_SAMPLE = re.compile(r"Failed to decode sample #(\d+)")


def leaves_graph_usable(error: BaseException) -> bool:
    """Returns True when the error is that of an operator other than the graph's inputs."""
    found = _OPERATOR.search(str(error)) if isinstance(error, RuntimeError) else None
    return found is not None and "external" not in found[1].lower()


def sample_of(error: BaseException) -> int | None:
    """Returns the number, in its micro-batch, of the sample that a decoder rejected; None where the error names
    none."""
    found = _SAMPLE.search(str(error)) if isinstance(error, RuntimeError) else None
    return None if found is None else int(found[1])
