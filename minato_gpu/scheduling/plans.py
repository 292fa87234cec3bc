"""The ways to prepare one sample: all of it on the CPU, all on the device, or a part on either; and which are worth it.

A plan costs (cpu, device) seconds. Choosing one for every sample so that both kinds of lane are through together is a
multiple-choice knapsack, whose relaxation needs only the plans on the lower convex hull, and takes the *steps* from one
to the next in the order of what they gain: CPU seconds saved for each second of the device (Sinha and Zoltners, "The
multiple-choice knapsack problem", Operations Research 27(3), 1979). In other words, with a price on device time every
sample takes the plan that minimises cpu + price * device. A sample with two plans has one step, of ratio cpu / device;
so the threshold that ``routing`` computes over the steps of all samples is the one that it computed over samples.

Rejected: pricing the plans anew for every sample whenever the threshold moves. The hull is made once per sample, and
a change of threshold moves only what changes sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

END = -1  # the split of a plan that stays on the CPU to the end
WHOLE = 0  # the split of a plan that leaves everything that is still to be done to the device
SHORTEST_S = 1e-12


class Plan(NamedTuple):
    """The stages before ``split`` on the CPU, ``cpu`` seconds; the others on the device, ``device`` seconds.

    ``laying``: how much of ``cpu`` it takes to lay down what is handed over.
    """

    split: int
    cpu: float
    device: float
    laying: float = 0.0


class Step(NamedTuple):
    """From one plan of the hull to the next, ``plan``: saves ``cpu`` seconds there for ``device`` seconds here."""

    ratio: float
    cpu: float
    device: float
    plan: Plan


def hull(cpu: float, device: float | None, between: Sequence[Plan]) -> tuple[Step, ...]:
    """The steps from all on the CPU (``cpu`` seconds) to the plan that needs the device most, ratios falling.

    ``device``: seconds of everything there, None where that cannot be; ``between``: the plans that do a part here and a
    part there. Those that cost more of both than another one, or than a mixture of two others, are left out.
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
    """What ``hull`` is to be told of a sample whose stages before ``split`` are done: its costs from there on.

    Without a plan for this split the device's part is not known, and the CPU has to do the rest.
    """
    done = next((plan for plan in between if plan.split == split), None)
    if done is None:
        return cpu, None, ()
    spent = done.cpu - done.laying
    later = tuple(plan._replace(cpu=max(plan.cpu - spent, 0.0)) for plan in between if plan.split > split)
    return max(cpu - spent, 0.0), done.device, later
