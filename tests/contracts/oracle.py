"""Computes from a case alone what must come, and tells in words where an outcome is another.

The order is that of torch's own samplers. What a sample draws is the one thing that only the loader can say: the
plainest run of the same seed says it (``reference``), and every other one must draw the same.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch.utils.data

import minato_gpu
from tests.contracts.cases import ALLOWED, BAD, STREAM_OF, STREAMS, Case, elsewhere, steps
from tests.contracts.counts import counts_of_epoch, counts_of_part, same
from tests.contracts.kinds import KINDS
from tests.contracts.material import BROKEN
from tests.contracts.orders import Keys, orders
from tests.contracts.run import Outcome, Part, Raised

Drawn = dict[tuple[int, int], list[tuple[float, ...]]]  # by epoch and key: in the order of its occurrences


def differences(case: Case, outcome: Outcome, drawn: Drawn | None = None) -> list[str]:
    """What is not as it must be. ``drawn``: what samples draw, where that is promised."""
    found = [f"it warned: {warning}" for warning in outcome.warnings]
    for rank in range(case.ranks):
        for epoch, order in enumerate(orders(case, rank)):
            parts = [part for part in outcome.parts if part.rank == rank and part.step.epoch == epoch]
            if not parts or (case.ranks > 1 and case.interruption == "elsewhere"):  # of these see _shared
                continue
            wrong = (*_epoch(case, order, parts), *counts_of_epoch(case, order, parts))
            found += [f"epoch {epoch} of rank {rank}: {words}" for words in wrong]
    if case.ranks > 1 and case.interruption == "elsewhere":
        found += _shared(case, outcome)
    for part in outcome.parts:
        wrong = (*_content(case, part), *counts_of_part(case, part))
        found += [f"{part.step} of rank {part.rank}: {words}" for words in wrong]
    if not (case.ends_early and outcome.parts[-1].errors):
        found += same("steps", [part.step for part in outcome.parts if part.rank == 0], steps(case))
    found += _drawn(case, outcome, drawn) if drawn is not None else []
    if case.fault.startswith("handler"):
        failed = sum(len(part.errors) if case.raises else part.stats["samples_failed"] for part in outcome.parts)
        told = [(bad.index, bad.error, BROKEN in bad.traceback) for bad in outcome.asked]
        found += same("what on_error was asked about", told, [(BAD, "ValueError", True)] * failed)
    return found


# --- what came of an epoch ---------------------------------------------------------------------------------


def _epoch(case: Case, order: list[Keys], parts: list[Part]) -> Iterator[str]:
    """The keys and errors of all parts of an epoch, against its order."""
    got = [keys for part in parts for keys in _keys(part)]
    for before, after in pairwise(parts):
        if before.got and isinstance(before.got[-1], Raised):  # is tried again: the consumer had not gone on
            yield from same("what came again", _keys(after)[:1], [_ERROR])
            got.remove(_ERROR)
    for error in (error for part in parts for error in part.errors):
        yield from _error(case, error)
    due = _due(case, order)
    ended = case.ends_early and _ERROR in got
    whole = parts[-1].step.then != "leave"
    if whole and case.ends_early and _ERROR in due:
        yield from same("how it ended", got[-1:], [_ERROR])
    if not whole and not ended:
        yield from same("how much came", len(got), parts[-1].step.take)
    if case.lateness > 0:
        yield from _overtaken(case, order, due, got, whole=whole and not ended)
    elif case.fault == "killed" and ended:  # at once, whatever lies ready
        yield from same("batches", got[:-1], due[: len(got) - 1])
    else:
        yield from same("batches", got, due if whole else due[: len(got)])


_ERROR: Keys = [-1]  # in the place of a batch


def _keys(part: Part) -> list[Keys]:
    return [_ERROR if isinstance(each, Raised) else [sample.key for sample in each] for each in part.got]


def _due(case: Case, order: list[Keys]) -> list[Keys]:
    """The batches, if none is overtaken."""
    if not case.fails:
        return order
    found, failed = list[Keys](), 0
    for batch in order:
        good = [key for key in batch if key != BAD]
        failed += len(batch) - len(good)
        if good != batch and (case.raises or case.fault == "killed" or (case.fault == "too many" and failed > ALLOWED)):
            found.append(_ERROR)
            if case.ends_early:
                break
        elif good:
            found.append(good)
    return found


def _overtaken(case: Case, order: list[Keys], due: list[Keys], got: list[Keys], *, whole: bool) -> Iterator[str]:
    """Batches out of order: each sample as often as in order, none later than allowed. An error takes the place of a
    batch."""
    errors = got.count(_ERROR)
    got = [batch for batch in got if batch != _ERROR]
    missing = Counter(key for batch in order for key in batch if key != BAD or not case.fails)
    missing.subtract(key for batch in got for key in batch)
    if min(missing.values(), default=0) < 0:
        yield f"came too often: {sorted(key for key, n in missing.items() if n < 0)}"
    if whole:
        if missing.total() > errors * max(map(len, order)):
            yield f"missing: {sorted(missing.elements())}"
        yield from same("number of batches", len(got) + errors, len(due))
    if whole and not case.fails:
        yield from same("sizes of batches", sorted(map(len, got)), sorted(map(len, order)))
    if whole and not errors and case.sampler == "batches":
        yield from same("batches", sorted(got), sorted(due))
    if case.streams:
        yield from _each_in_order(got)
    elif case.interruption == "none" and not case.fails:
        yield from _lateness(case, order, got)


_KINDS: dict[str, tuple[type[Exception], str]] = {
    "raise": (ValueError, BROKEN),
    "handler raises": (ValueError, BROKEN),
    "too many": (minato_gpu.TooManyFailures, BROKEN),
    "killed": (RuntimeError, "DataLoader worker (pid"),
}


def _error(case: Case, error: Raised) -> Iterator[str]:
    """It is of the due kind and names the sample, or the worker."""
    kind, text = _KINDS.get(case.fault, (None, ""))
    if kind is None or not issubclass(error.kind, kind) or text not in error.text:
        yield f"{error}, should be {kind and kind.__name__} that says {text!r}"


def _each_in_order(got: list[Keys]) -> Iterator[str]:
    """Batches do not mix streams, and each stream is in its own order."""
    for batch in got:
        yield from same(f"streams of the batch {batch}", len({key // STREAM_OF for key in batch}), 1)
    for worker in range(len(STREAMS)):
        keys = [key for batch in got for key in batch if key // STREAM_OF == worker]
        yield from same(f"order of stream {worker}", keys, sorted(keys))


def _lateness(case: Case, order: list[Keys], got: list[Keys]) -> Iterator[str]:
    """The n-th time a key comes is at most so many batches after its n-th place."""
    places = defaultdict[int, list[int]](list)
    for number, batch in enumerate(order):
        for key in batch:
            places[key].append(number)
    for number, batch in enumerate(got):
        for key in batch:
            place = places[key].pop(0) if places[key] else number
            if number - place > case.lateness:
                yield f"sample {key} of batch {place} came with batch {number}"


def _shared(case: Case, outcome: Outcome) -> Iterator[str]:
    """All ranks together, before and after another number of them."""
    for epoch, order in enumerate(orders(elsewhere(case), 0)):
        parts = [part for part in outcome.parts if part.step.epoch == epoch]
        got = Counter(sample.key for part in parts for batch in part.batches for sample in batch)
        due = Counter(key for batch in order for key in batch)
        bad = {BAD} if case.raises else set()
        if not case.drop_last and not bad:
            yield from same(f"samples of epoch {epoch} on all ranks", sorted(got.elements()), sorted(due.elements()))


# --- what the samples are ----------------------------------------------------------------------------------


def _content(case: Case, part: Part) -> Iterator[str]:
    for batch in part.batches:
        for sample in batch:
            yield from same(f"content of sample {sample.key}", sample.content, KINDS[case.data].content(sample.key))


def reference(case: Case) -> tuple[Case, Any] | None:
    """A case, and the class of its loader, whose samples draw what this one's must; None where that is not promised: in
    threads, of streams, and without workers but where PyTorch's loader draws the same."""
    if case.data == "pipeline" or (case.workers > 0 and case.kind == "process" and not case.streams):
        keeps = {name: getattr(case, name) for name in ("data", "sampler", "stay", "epochs")}
        return Case(**keeps, workers=1), minato_gpu.DataLoader
    if case.workers == 0 and not case.streams and case.fault == case.interruption == "none":
        return dataclasses.replace(case, stay="an epoch"), torch.utils.data.DataLoader
    return None


def draws(case: Case, outcome: Outcome) -> Drawn:
    """What each sample has drawn, by epoch and key. Raises AssertionError where two have drawn the same."""
    found: Drawn = defaultdict(list)
    for part in outcome.parts:
        for sample in (sample for batch in part.batches for sample in batch):
            found[part.step.epoch, sample.key].append(sample.drawn)
    every = [each for several in found.values() for each in several]
    assert len({*every}) == len(every), f"{case}: samples have drawn the same"
    return found


def _drawn(case: Case, outcome: Outcome, due: Drawn) -> Iterator[str]:
    for where, several in draws(case, outcome).items():
        missing = Counter(several) - Counter(due[where])
        if missing or (case.lateness == 0 and not case.fails and several != due[where][: len(several)]):
            yield f"sample {where[1]} of epoch {where[0]} has drawn {several}, should be {due[where]}"
