"""Computes from a case alone what must come, and tells in words where an outcome is another.

The order is that of torch's own samplers. What a sample draws is the one thing that only the loader can say: the
plainest run of the same seed says it (``reference``), and every other one must draw the same.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch.utils.data

import minato_gpu
from tests.contracts.cases import ALLOWED, BAD, STARTS, Case, elsewhere, steps
from tests.contracts.counts import counts_of_epoch, counts_of_part, named, same
from tests.contracts.kinds import KINDS, file_of
from tests.contracts.material import BROKEN, GONE, NO_KEYS, NO_START, SHORT
from tests.contracts.orders import Keys, orders, stream_of
from tests.contracts.run import Outcome, Part, Raised

Drawn = dict[tuple[int, int], list[tuple[float, ...]]]  # by epoch and key: in the order of its occurrences


def differences(case: Case, outcome: Outcome, drawn: Drawn | None = None) -> list[str]:
    """What is not as it must be. ``drawn``: what samples draw, where that is promised."""
    found = [f"it warned: {warning}" for warning in outcome.warnings]
    shared = case.interruption == "elsewhere" and (case.ranks > 1 or case.streams)  # anew, among others
    for rank in range(case.ranks):
        seen: set[int] = set()
        for epoch, order in enumerate(orders(case, rank)):
            parts = [part for part in outcome.parts if part.rank == rank and part.step.epoch == epoch]
            if not parts or shared:
                continue
            new = {key for batch in order for key in batch} - seen
            seen |= new
            wrong = (*of_epoch(case, order, parts), *counts_of_epoch(case, order, parts, new))
            found += [f"epoch {epoch} of rank {rank}: {words}" for words in wrong]
    if shared:
        found += _shared(case, outcome)
    for part in outcome.parts:
        wrong = (*of_content(case, part), *counts_of_part(case, part))
        found += [f"{part.step} of rank {part.rank}: {words}" for words in wrong]
    if not (case.ends_early and outcome.parts[-1].errors):
        found += same("steps", [part.step for part in outcome.parts if part.rank == 0], steps(case))
    found += of_drawn(case, outcome, drawn) if drawn is not None else []
    found += _repeated(case, outcome)
    found += same("how a forked process ended", outcome.forks, [0] if case.interruption == "forked" else [])
    if case.fault.startswith("handler"):
        failed = sum(len(part.errors) if case.raises else part.stats["samples_failed"] for part in outcome.parts)
        told = [(bad.index, named(case, bad.error), _OF_SAMPLE[case.error][1] in f"{bad}") for bad in outcome.asked]
        found += same("what on_error was asked about", told, [(BAD, True, True)] * failed)
    return found


# --- what came of an epoch ---------------------------------------------------------------------------------


def of_epoch(case: Case, order: list[Keys], parts: list[Part]) -> Iterator[str]:
    """The keys and errors of all parts of an epoch, against its order."""
    got = [keys for part in parts for keys in _keys(part)]
    for before, after in pairwise(parts):
        if before.got and isinstance(before.got[-1], Raised):  # is tried again: the consumer had not gone on
            yield from same("what came again", _keys(after)[:1], [_ERROR])
            got.remove(_ERROR)
    for part in parts:
        for error in part.errors:
            yield from _error(case, part, error)
    if case.fault in STARTS:
        yield from same("what came", got, [_ERROR])
        return
    due = _due(case, order)
    ended = case.ends_early and _ERROR in got
    whole = parts[-1].step.then != "leave"
    if case.fault == "sampler raises" and ended:  # others that lie ready may come after it, and then the end
        yield from same("errors", got.count(_ERROR), 1)
        got.remove(_ERROR)
        got.append(_ERROR)
    if whole and case.ends_early and (_ERROR in due or case.fault == "sampler raises"):
        yield from same("how it ended", got[-1:], [_ERROR])
    if not whole and not ended:
        yield from same("how much came", len(got), parts[-1].step.take)
    if case.lateness > 0:
        yield from _overtaken(case, order, due, got, whole=whole and not ended)
    elif case.fault in ("killed", "hung", "sampler raises") and ended:  # at once, whatever lies ready
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
        enough = ALLOWED if case.fault == "too many" else 0
        if good != batch and (case.raises or case.ends_early) and failed > enough:
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
        yield from _each_in_order(case, got)
    elif case.interruption == "none" and not case.fails:
        yield from of_lateness(case, order, got)


_RAISED: dict[str, tuple[type[Exception], str]] = {
    "collate raises": (ArithmeticError, BROKEN),
    "start raises": (OSError, NO_START),
    "start kills": (RuntimeError, "in a row ended before they had taken any work"),
    "sampler raises": (OSError, NO_KEYS),
    "killed": (RuntimeError, "DataLoader worker (pid"),
    "hung": (minato_gpu.WorkerHung, "_hangs_in_here"),
}
_OF_SAMPLE: dict[str, tuple[type[Exception], str]] = {
    "ValueError": (ValueError, BROKEN),
    "StopIteration": (RuntimeError, BROKEN),
    "local": (Exception, BROKEN),
    "unsendable": (Exception, "'send'"),
    "no file": (FileNotFoundError, GONE),
    "too short": (EOFError, SHORT),
}


def _error(case: Case, part: Part, error: Raised) -> Iterator[str]:
    """It is of the due kind, says what was raised, and where."""
    kind, text = _RAISED.get(case.fault, _OF_SAMPLE[case.error])
    if case.fault == "too many":
        kind, text = minato_gpu.TooManyFailures, f"max_failures={ALLOWED}"
    texts = [text]
    if part.stats and (case.raises or case.fault == "hung") and not (case.streams and case.workers == 0):
        texts.append(f"epoch {part.step.epoch}")
        together = case.data == "many at once" and case.workers == 0
        if not case.streams and not together and case.fault != "collate raises":
            texts += [f"index {BAD}", "lane cpu"]
            texts += [f"path '/of/{BAD}'", "stage 'read'"] if case.data == "pipeline" and case.raises else []
    missing = [each for each in texts if each not in error.text]
    if (
        case.fault in ("none", "skip", "retry")
        or (case.replaces and case.fault != "start kills")
        or not issubclass(error.kind, kind)
        or missing
    ):
        yield f"{error}, should be {kind.__name__} that says {missing}"


def _each_in_order(case: Case, got: list[Keys]) -> Iterator[str]:
    """Batches do not mix streams, and each stream is in its own order."""
    for worker in range(max(1, case.workers)):
        stream = stream_of(case, worker)
        batches = [batch for batch in got if not {*batch}.isdisjoint(stream)]
        keys = [key for batch in batches for key in batch]
        yield from same(f"order of stream {worker}", keys, [key for key in stream if key in keys])


def of_lateness(case: Case, order: list[Keys], got: list[Keys]) -> Iterator[str]:
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
    """All ranks, or streams, together, before and after another number of them: a batch that raised and the end of an
    epoch, or of each stream, may be lost, where that is asked for."""
    ends = case.workers + elsewhere(case).workers if case.streams else 1
    for epoch, order in enumerate(orders(dataclasses.replace(elsewhere(case), drop_last=False), 0)):
        parts = [part for part in outcome.parts if part.step.epoch == epoch]
        got = Counter(sample.key for part in parts for batch in part.batches for sample in batch)
        due = Counter(key for batch in order for key in batch)
        size = case.batch or 1
        lost = sum(len(part.errors) for part in parts) * size + (ends * (size - 1) if case.drop_last else 0)
        if got - due or (due - got).total() > lost:
            yield f"samples of epoch {epoch}, of all together: too often {got - due}, missing {due - got}"


# --- what the samples are ----------------------------------------------------------------------------------


def of_content(case: Case, part: Part) -> Iterator[str]:
    for batch in part.batches:
        for sample in batch:
            due = KINDS[case.data].content(sample.key)
            if case.interruption == "changed" and part.step.epoch > 0:
                due = zlib.crc32(file_of(sample.key, 1))
            yield from same(f"content of sample {sample.key}", sample.content, due)


def _repeated(case: Case, outcome: Outcome) -> Iterator[str]:
    """What a worker that died or hung had begun is counted, and nothing else; but where the first samples are prepared
    once more, as it turns out that only the worker that joins them can have them."""
    if case.replaces and case.interruption == "none" and case.ranks == 1 and case.data != "closures":
        stats = [part.stats for part in outcome.parts]
        again = outcome.begun - sum(each["samples_delivered"] for each in stats)
        yield from same("samples_repeated", sum(each["samples_repeated"] for each in stats), again)


def reference(case: Case) -> tuple[Case, Any] | None:
    """A case, and the class of its loader, whose samples draw what this one's must; None where nothing is drawn ("many
    at once") or that is not promised: in threads, without workers but where PyTorch's loader
    draws the same, and of a second iterator that has workers of its own, as the first one's persist."""
    if case.data == "many at once" or (case.interruption == "two at once" and case.stay == "persistent"):
        return None
    if case.data == "pipeline" or (case.workers > 0 and case.kind == "process" and not case.streams):
        of_batches = ("batch", "drop_last") if case.collate == "draws" else ()
        keeps = {name: getattr(case, name) for name in ("data", "sampler", "stay", "epochs", "collate", *of_batches)}
        if case.sampler == "listed":
            keeps["sampler"] = "plainly listed"
        return Case(**keeps, workers=1), minato_gpu.DataLoader
    if case.streams and case.workers > 0 and case.kind == "process" and case.fault == "none" and case.start == "plain":
        ended = case.stay != "an epoch" and (case.interruption == "between" or case.drop_last)  # a stream, when saved
        if (ended or case.data != "stream") and case.interruption not in ("none", "left"):
            return None  # a state is taken up where generators begin anew
        stay = "an epoch" if case.stay == "an epoch" else "persistent"
        keeps = {name: getattr(case, name) for name in ("data", "sampler", "batch", "drop_last", "workers", "epochs")}
        return Case(**keeps, stay=stay), torch.utils.data.DataLoader
    if case.workers == 0 and not case.streams and case.fault == case.interruption == "none":
        return dataclasses.replace(case, stay="an epoch", budget=None), torch.utils.data.DataLoader
    return None


def due_draws(case: Case, drawn: Callable[[Case, Any], Drawn]) -> Drawn | None:
    """What samples and batches of a case draw, by what ``drawn`` says of others; None where that is not promised. What
    samples draw does not depend on what is drawn for batches."""
    by = reference(case)
    if by is None:
        return None
    found = drawn(*by)
    if case.collate == "draws" and case.workers > 0:
        usual = drawn(dataclasses.replace(by[0], collate="usual", batch=4, drop_last=False), by[1])
        found = {**usual, **{where: each for where, each in found.items() if where[1] == -1}}
    return found


def draws(case: Case, outcome: Outcome) -> Drawn:
    """What each sample has drawn, by epoch and key, and by epoch and -1 what was drawn for each batch, but in threads
    or by the caller for a pipeline. Raises AssertionError where two have drawn the same."""
    found: Drawn = defaultdict(list)
    joined = case.kind == "process" and (case.workers > 0 or case.data != "pipeline")
    for part in outcome.parts:
        for sample in (sample for batch in part.batches for sample in batch):
            found[part.step.epoch, sample.key].append(_promised(case, sample.drawn))
        if case.collate == "draws" and joined:
            found[part.step.epoch, -1] += part.joined
    every = [each for several in found.values() for each in several]
    assert len({*every}) == len(every), f"{case}: samples, or batches, have drawn the same"
    return found


def _promised(case: Case, drawn: tuple[float, ...]) -> tuple[float, ...]:
    """What a sample draws wherever it is prepared: a stage of a pipeline draws from the global generators on worker
    processes alone."""
    return drawn[:1] if case.data == "pipeline" and (case.workers == 0 or case.kind == "thread") else drawn


def of_drawn(case: Case, outcome: Outcome, due: Drawn) -> Iterator[str]:
    in_order = case.lateness == 0 and not case.fails
    for where, several in draws(case, outcome).items():
        if where[1] == -1 and not in_order:  # batches of other samples
            continue
        expected = [_promised(case, drawn) for drawn in due[where]]
        missing = Counter(several) - Counter(expected)
        if missing or (in_order and several != expected[: len(several)]):
            yield f"sample {where[1]} of epoch {where[0]} has drawn {several}, should be {expected}"
