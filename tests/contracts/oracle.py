"""Computes from a case alone what must come, and tells in words where an outcome is another.

The order is that of torch's own samplers. What a sample draws is the one thing that only the loader can say: the
plainest run of the same seed says it (``plainest``), and every other one must draw the same.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch.utils.data import RandomSampler

import minato_gpu
from tests.contracts.cases import BAD, SAMPLES, STREAM_OF, STREAMS, Case, elsewhere, steps
from tests.contracts.material import BROKEN, SEED, content_of, sampler_of
from tests.contracts.run import Batch, Outcome, Part

Keys = list[int]
Drawn = dict[tuple[int, int], list[tuple[float, ...]]]  # by epoch and key: in the order of its occurrences


def differences(case: Case, outcome: Outcome, drawn: Drawn | None = None) -> list[str]:
    """What is not as it must be. ``drawn``: what samples draw, where that is promised."""
    found = [f"it warned: {warning}" for warning in outcome.warnings]
    for rank in range(case.ranks):
        orders = _orders(case, rank)
        for epoch, order in enumerate(orders):
            parts = [part for part in outcome.parts if part.rank == rank and part.step.epoch == epoch]
            if case.ranks > 1 and case.interruption == "elsewhere":
                continue  # see _shared
            found += [f"epoch {epoch} of rank {rank}: {words}" for words in _epoch(case, order, parts)]
    if case.ranks > 1 and case.interruption == "elsewhere":
        found += _shared(case, outcome)
    for part in outcome.parts:
        found += [f"{part.step} of rank {part.rank}: {words}" for words in (*_content(case, part), *_counts(case, part))]
    found += _drawn(case, outcome, drawn) if drawn is not None else []
    if case.fault == "handler":
        failed = sum(part.stats["samples_failed"] for part in outcome.parts)
        told = [(bad.index, str(bad.error)) for bad in outcome.asked]
        found += _same("what on_error was asked about", told, [(BAD, BROKEN)] * failed)
    return found


def _same(what: str, got: Any, due: Any) -> Iterator[str]:
    if got != due:
        yield f"{what}: {got}, should be {due}"


# --- the order ---------------------------------------------------------------------------------------------


def _orders(case: Case, rank: int) -> list[list[Keys]]:
    """The batches of each epoch, as keys, if nothing happens and nothing is overtaken."""
    if case.streams:
        return [_of_streams(case)] * case.epochs
    generator = torch.Generator().manual_seed(SEED)
    arguments = sampler_of(case, rank)
    sampler = arguments.get("sampler") or arguments.get("batch_sampler") or range(SAMPLES)
    found = []
    for epoch in range(case.epochs):
        if case.stay != "persistent" or epoch == 0:
            torch.empty((), dtype=torch.int64).random_(generator=generator)  # the epoch's seed
        if case.sampler == "shuffle=True":
            sampler = RandomSampler(range(SAMPLES), generator=generator)
        if case.sampler == "distributed":
            sampler.set_epoch(epoch)
        keys: list[Any] = list(sampler)
        found.append(keys if case.sampler == "batches" else _batched(case, keys))
    return found


def _batched(case: Case, keys: Keys) -> list[Keys]:
    size = case.batch or 1
    batches = [keys[at : at + size] for at in range(0, len(keys), size)]
    return [batch for batch in batches if len(batch) == size or not case.drop_last]


def _of_streams(case: Case) -> list[Keys]:
    """A batch of each worker's stream in turn."""
    workers = range(max(1, case.workers))
    each = [_batched(case, [worker * STREAM_OF + n for n in range(STREAMS[worker])]) for worker in workers]
    return [batch for turn in zip_longest(*each) for batch in turn if batch is not None]


# --- what came of an epoch ---------------------------------------------------------------------------------


def _epoch(case: Case, order: list[Keys], parts: list[Part]) -> Iterator[str]:
    """The keys of all parts of an epoch, against its order."""
    got = [[sample.key for sample in batch] for part in parts for batch in part.batches]
    errors = [error for part in parts for _, error in part.errors]
    whole = parts[-1].step.then != "leave" and not case.ends_early
    due = order if case.fault == "raise" or not case.fails else [_without(batch) for batch in order]
    bad = [number for number, batch in enumerate(order) if BAD in batch and case.fails]
    yield from _errors(case, errors, bad if whole or case.ends_early else bad[: len(errors)])
    if case.lateness == 0:
        due = [batch for batch in due if batch and not (case.fault == "raise" and BAD in batch)]
        yield from _same("batches", got, due if whole else due[: len(got)])
        if not whole and not case.ends_early:
            yield from _same("batches taken", len(got) + len(errors), parts[0].step.take)
        return
    missing = Counter(key for batch in due for key in batch)
    missing.subtract(key for batch in got for key in batch)
    if min(missing.values(), default=0) < 0:
        yield f"came too often: {sorted(key for key, n in missing.items() if n < 0)}"
    lost = sum(missing.values())
    if whole and lost > (len(errors) * (case.batch or 1) if case.fault == "raise" else 0):
        yield f"missing: {sorted(missing.elements())}"
    if whole and not case.fails:
        yield from _same("sizes of batches", sorted(map(len, got)), sorted(map(len, order)))
    if case.sampler == "batches" and case.fault != "raise" and whole:
        yield from _same("batches", sorted(got), sorted(batch for batch in due if batch))
    if case.streams:
        yield from _each_in_order(got)
    elif case.interruption == "none" and not case.fails:
        yield from _lateness(case, order, got)


def _without(batch: Keys) -> Keys:
    return [key for key in batch if key != BAD]


def _errors(case: Case, errors: list[Exception], bad: list[int]) -> Iterator[str]:
    """Each is of the due kind and names the sample, and there are as many as batches with a bad one."""
    kinds: dict[str, tuple[type[Exception], str]] = {
        "raise": (ValueError, BROKEN),
        "too many": (minato_gpu.TooManyFailures, BROKEN),
        "killed": (RuntimeError, "DataLoader worker (pid"),
    }
    if case.fault not in kinds:
        yield from _same("errors", [repr(error) for error in errors], [])
        return
    kind, text = kinds[case.fault]
    for error in errors:
        if not isinstance(error, kind) or text not in f"{error} {error.__cause__}":
            yield f"raised {error!r}, should be a {kind.__name__} that says {text!r}"
    due = min(1, len(bad)) if case.ends_early else len(bad)
    if case.lateness == 0 or case.ends_early:
        yield from _same("errors", len(errors), due)


def _each_in_order(got: list[Keys]) -> Iterator[str]:
    """Batches do not mix streams, and each stream is in its own order."""
    for batch in got:
        yield from _same(f"streams of the batch {batch}", len({key // STREAM_OF for key in batch}), 1)
    for worker in range(len(STREAMS)):
        keys = [key for batch in got for key in batch if key // STREAM_OF == worker]
        yield from _same(f"order of stream {worker}", keys, sorted(keys))


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
    orders = _orders(elsewhere(case), 0)
    for epoch, order in enumerate(orders):
        parts = [part for part in outcome.parts if part.step.epoch == epoch]
        got = Counter(sample.key for part in parts for batch in part.batches for sample in batch)
        due = Counter(key for batch in order for key in batch)
        bad = {BAD} if case.fault == "raise" else set()
        if not case.drop_last and not bad:
            yield from _same(f"samples of epoch {epoch} on all ranks, beyond and below", (got - due, due - got), ({}, {}))


# --- what the samples are ----------------------------------------------------------------------------------


def _content(case: Case, part: Part) -> Iterator[str]:
    for batch in part.batches:
        for sample in batch:
            yield from _same(f"content of sample {sample.key}", sample.content, content_of(case, sample.key))


def plainest(case: Case) -> Case | None:
    """The case whose samples draw what this one's must; None where it is not promised what they draw: in threads,
    without workers, and of streams."""
    if case.streams or (case.data != "pipeline" and (case.workers == 0 or case.kind == "thread")):
        return None
    keeps = {name: getattr(case, name) for name in ("data", "sampler", "stay", "epochs")}
    return Case(**keeps, workers=1)


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


# --- what is counted ---------------------------------------------------------------------------------------


def _counts(case: Case, part: Part) -> Iterator[str]:
    """``stats()`` of one part."""
    stats = part.stats
    if not stats:
        return
    yield from _same("samples_delivered", stats["samples_delivered"], sum(map(len, part.batches)))
    yield from _same("batches_delivered", stats["batches_delivered"], len(part.batches))
    yield from _same("samples_padded", stats["samples_padded"], 0)
    if not case.replaces:
        yield from _same("samples_repeated", stats["samples_repeated"], 0)
    if stats["lateness"]["max"] > case.lateness:
        yield f"lateness is said to be {stats['lateness']['max']}"
    for failure in stats["failures"]:
        told = failure["epoch"], failure["index"]
        yield from _same("failure", told, (part.step.epoch, str(BAD)))
