"""Which cases of a test to run where its parameters have too many combinations: a few in which every pair occurs.

Most faults that depend on parameters depend on one value or on two together (Kuhn, Wallace and Gallo, "Software fault
interactions and implications for software testing", 2004). So each value of a parameter is tried with each value of
every other one, as far as the test has such a case, and not each combination of all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

Case = Mapping[str, Hashable]
"""The value of each factor."""


def pairwise(cases: Sequence[Case], alone: frozenset[str] = frozenset()) -> list[int]:
    """The numbers of some of the cases, rising, among which all values, and all pairs of values of two factors, occur
    that occur among all. The same for the same cases.

    ``alone``: factors of which each value is to occur, with whatever others. Of cases with other factors than the rest
    at least one is chosen. Greedy: always the case that brings most new pairs, then the one whose values of the factors
    ``alone`` have been chosen least often, then the first.
    """
    holders = defaultdict[Hashable, list[int]](list)  # the cases that have a pair
    for number, case in enumerate(cases):
        for pair in _pairs(case, alone):
            holders[pair].append(number)
    fresh = [0] * len(cases)  # how many pairs of each case no chosen one has
    for numbers in holders.values():
        for number in numbers:
            fresh[number] += 1
    chosen: list[int] = []
    often: Counter[Hashable] = Counter()

    def worth(number: int) -> tuple[int, int, int]:
        again = sum(often[value] for value in cases[number].items() if value[0] in alone) if alone else 0
        return fresh[number], -again, -number

    while holders:
        at = max(range(len(cases)), key=worth)
        for pair in _pairs(cases[at], alone):
            for number in holders.pop(pair, ()):
                fresh[number] -= 1
        chosen.append(at)
        often.update(cases[at].items())
    return sorted(chosen)


def _pairs(case: Case, alone: frozenset[str]) -> set[Hashable]:
    """What the case covers: the set of its factors, and each pair of values, or each value where there is no pair."""
    values = sorted(case.items(), key=lambda item: item[0])
    apart = [value for value in values if value[0] in alone]
    together = [value for value in values if value[0] not in alone]
    return {tuple(case), *apart, *(combinations(together, 2) if len(together) > 1 else together)}
