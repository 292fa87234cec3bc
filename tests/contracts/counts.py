"""Compares what ``stats()`` counts with what came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.contracts.cases import BAD, Case
from tests.contracts.orders import Keys
from tests.contracts.run import Part, Raised


def same(what: str, got: Any, due: Any) -> Iterator[str]:
    """Says it where the two differ."""
    if got != due:
        yield f"{what}: {got}, should be {due}"


def counts_of_part(case: Case, part: Part) -> Iterator[str]:
    """``stats()`` of one part."""
    stats = part.stats
    if not stats:
        return
    batches = [*part.batches, *(batch for batch in part.undone if not isinstance(batch, Raised))]
    yield from same("samples_delivered", stats["samples_delivered"], sum(map(len, batches)))
    yield from same("batches_delivered", stats["batches_delivered"], len(batches))
    yield from same("samples_padded", stats["samples_padded"], 0)
    if not case.replaces:
        yield from same("samples_repeated", stats["samples_repeated"], 0)
    if stats["lateness"]["max"] > case.lateness:
        yield f"lateness is said to be {stats['lateness']['max']}"
    error = "KilledWorkers" if case.fault == "killed twice" else "ValueError"
    for failure in stats["failures"]:
        told = {name: failure[name] for name in ("epoch", "index", "lane", "error")}
        yield from same("failure", told, {"epoch": part.step.epoch, "index": str(BAD), "lane": "cpu", "error": error})
    done = sum(stats[name] for name in ("samples_delivered", "samples_failed", "samples_skipped"))
    if part.step.take is None and not (case.ends_early and part.errors) and stats["samples_expected"] is not None:
        yield from same("samples delivered, failed and skipped", done, stats["samples_expected"])
    if case.fault == "none" == case.interruption:
        prepared = sum(lane["samples"] for lane in stats["lanes"].values())
        yield from same("samples of all lanes", prepared, stats["samples_delivered"])


def counts_of_epoch(case: Case, order: list[Keys], parts: list[Part]) -> Iterator[str]:
    """``stats()`` of the parts of an epoch, which come to its end."""
    every = [part.stats for part in parts if part.stats]
    ended = case.ends_early and parts[-1].errors
    if not every or parts[-1].step.then == "leave" or ended:
        return
    flat = [key for batch in order for key in batch]
    bad = flat.count(BAD)
    positions = [failure["position"] for each in every for failure in each["failures"]]
    yield from same("keys at the positions of failures", [flat[at] for at in positions], [BAD] * len(positions))
    if not case.raises:
        yield from same("samples_failed", sum(each["samples_failed"] for each in every), bad if case.fails else 0)
    if not case.streams and case.sampler != "batches":
        yield from same("samples_expected", every[0]["samples_expected"], sum(map(len, order)))
    if case.cache == "memory" and case.stay == "an epoch" and case.fault == case.interruption == "none":
        yield from same("failed reads", [each["reads"]["failed"] for each in every], [0])
    if case.interruption == "none" and case.fault == "killed twice":
        died = [(each["workers"]["died"], each["workers"]["replaced"]) for each in every]
        yield from same("workers that died and were replaced", died, [(2 * bad, 2 * bad)])
    if not case.replaces:
        yield from same("workers that died", [each["workers"]["died"] for each in every], [0] * len(every))
