"""Plans: the ways to divide one sample between CPU and device, and which of them are worth choosing.

A plan costs (cpu, device) seconds. Choosing one per sample so that both kinds of lane end together is a multiple-choice
knapsack. Its relaxation needs only the plans on the lower convex hull, and takes the *steps* from one plan to the next
in the order of CPU seconds saved per device second (Sinha and Zoltners, "The multiple-choice knapsack problem",
Operations Research 27(3), 1979). Equivalently: with a price on device time, every sample takes the plan that minimises
cpu + price * device. A sample with two plans has one step of ratio cpu / device, so the threshold that ``routing``
computes over steps generalises the one over samples.

Rejected: pricing all plans of every sample again when the threshold moves. The hull is made once per sample, and a new
threshold moves only what changes sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

END = -1  # the split of a plan that stays on the CPU to the end
WHOLE = 0  # the split of a plan that leaves all remaining stages to the device
SHORTEST_S = 1e-12


class Plan(NamedTuple):
    """Runs the stages before ``split`` (or ``END``, ``WHOLE``) on the CPU and the others on the device."""

    split: int
    cpu: float  # seconds
    device: float  # seconds
    store_s: float = 0.0  # part of ``cpu`` that stores the sample for the device


class Step(NamedTuple):
    """One step along the hull to ``plan``: saves CPU seconds for device seconds."""

    ratio: float  # cpu / device
    cpu: float  # seconds saved
    device: float  # seconds spent
    plan: Plan


def hull(cpu: float, device: float | None, between: Sequence[Plan]) -> tuple[Step, ...]:
    """Returns the steps from all on the CPU to the plan that uses the device most, with falling ratios.

    ``cpu``, ``device``: seconds of the whole sample there (None: impossible); ``between``: the divided plans. Plans
    that are dominated by another, or by a mixture of two, are left out.
    """
    if device is not None and all(plan.cpu * device + plan.device * cpu >= cpu * device for plan in between):
        return (Step(cpu / max(device, SHORTEST_S), cpu, device, Plan(WHOLE, 0.0, device)),) if cpu > 0 else ()
    plans = sorted(between, key=lambda plan: (plan.device, plan.cpu))
    if device is not None:
        plans = [plan for plan in plans if plan.device < device]
        plans.append(Plan(WHOLE, 0.0, device))
    steps: list[Step] = []
    for plan in plans:
        while True:
            before = steps[-1].plan if steps else Plan(END, cpu, 0.0)
            saved, spent = before.cpu - plan.cpu, plan.device - before.device
            if saved <= 0:
                break
            step = Step(saved / max(spent, SHORTEST_S), saved, spent, plan)
            if steps and step.ratio >= steps[-1].ratio:
                steps.pop()
                continue
            steps.append(step)
            break
    return tuple(steps)


def rest(cpu: float, between: Iterable[Plan], split: int) -> tuple[float, float | None, tuple[Plan, ...]]:
    """Returns the arguments of ``hull`` for a sample whose stages before ``split`` are done.

    Without a plan at this split the device's costs are unknown, and the CPU does the rest.
    """
    done = next((plan for plan in between if plan.split == split), None)
    if done is None:
        return cpu, None, ()
    spent = done.cpu - done.store_s
    later = tuple(plan._replace(cpu=max(plan.cpu - spent, 0.0)) for plan in between if plan.split > split)
    return max(cpu - spent, 0.0), done.device, later
