"""Compares what ``stats()`` counts with what came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.contracts.cases import BAD, FILES, Case, Step, elsewhere
from tests.contracts.kinds import ROW_BYTES, UNEVEN_BYTES
from tests.contracts.orders import Keys
from tests.contracts.run import Part, Raised


def same(what: str, got: Any, due: Any) -> Iterator[str]:
    """Says it where the two differ."""
    if got != due:
        yield f"{what}: {got}, should be {due}"


def named(case: Case, error: str) -> bool:
    """Whether it is the name of what the sample of BAD raises."""
    due = {"killed twice": ("KilledWorkers",), "hung twice": ("WorkerHung",)}.get(case.fault)
    kinds = {
        "local": ("Local",),
        "unsendable": ("AttributeError", "PicklingError", "TypeError"),
        "no file": ("FileNotFoundError",),
        "too short": ("EOFError",),
    }
    return error in (due or kinds.get(case.error, (case.error,)))


def counts_of_part(case: Case, part: Part) -> Iterator[str]:
    """``stats()`` of one part."""
    stats = part.stats
    if not stats:
        return
    batches = [*part.batches, *(batch for batch in part.undone if not isinstance(batch, Raised))]
    yield from same("samples_delivered", stats["samples_delivered"], sum(map(len, batches)))
    yield from same("batches_delivered", stats["batches_delivered"], len(batches))
    yield from same("samples_padded", stats["samples_padded"], 0)
    if not (case.replaces or case.data == "closures" or case.error == "unsendable"):  # else joined anew
        yield from same("samples_repeated", stats["samples_repeated"], 0)
    if stats["lateness"]["max"] > case.lateness:
        yield f"lateness is said to be {stats['lateness']['max']}"
    stage = "read" if case.data == "pipeline" else "send" if case.error == "unsendable" else None
    path = f"/of/{BAD}" if case.data == "pipeline" and not case.replaces else None
    for failure in stats["failures"]:
        told = {name: failure[name] for name in ("epoch", "index", "lane", "stage", "path")}
        due = {"epoch": part.step.epoch, "index": str(BAD), "lane": "cpu", "stage": stage, "path": path}
        yield from same("failure", told, due)
        if not named(case, failure["error"]):
            yield f"the error is named {failure['error']}"
    yield from _memory(case, part)
    if part.step.take is None and not part.errors and part.elapsed_s:
        yield from same("seconds of an epoch that has ended", part.elapsed_s, stats["elapsed_s"])
    done = sum(stats[name] for name in ("samples_delivered", "samples_failed", "samples_skipped"))
    if part.step.take is None and not (case.ends_early and part.errors) and stats["samples_expected"] is not None:
        yield from same("samples delivered, failed and skipped", done, stats["samples_expected"])
    if case.fault == "none" == case.interruption:
        prepared = sum(lane["samples"] for lane in stats["lanes"].values())
        yield from same("samples of all lanes", prepared, stats["samples_delivered"])


def _memory(case: Case, part: Part) -> Iterator[str]:
    """The budget, or the one batch that must be whole to be delivered, and a sample per worker; 5 % for wrapping."""
    workers = max(case.workers, elsewhere(case).workers, case.most or 1)
    each = UNEVEN_BYTES if case.data == "uneven" else ROW_BYTES
    most = 1.05 * (max(case.budget or 0, (case.batch or 1) * each) + workers * each)
    if (
        case.data in ("many at once", "uneven")
        and case.budget is not None
        and part.stats["bytes_in_flight_peak"] > most
    ):
        yield f"bytes in flight, at most {most}: {part.stats['bytes_in_flight_peak']}"
    if part.step == Step(part.step.epoch) and case.stay != "epochs" and not (case.ends_early and part.errors):
        yield from same("bytes in flight at the end", part.stats["bytes_in_flight"], 0)


def counts_of_epoch(case: Case, order: list[Keys], parts: list[Part], new: set[int]) -> Iterator[str]:
    """``stats()`` of the parts of an epoch, which come to its end. ``new``: the keys that no epoch before had."""
    every = [part.stats for part in parts if part.stats]
    ended = case.ends_early and parts[-1].errors
    if not every or parts[-1].step.then == "leave" or ended:
        return
    flat = [key for batch in order for key in batch]
    bad = flat.count(BAD)
    if case.streams and case.interruption == "none":
        done = sum(each[name] for each in every for name in ("samples_delivered", "samples_failed", "samples_skipped"))
        yield from same("samples of streams delivered, failed and skipped", done, len(flat))
    positions = [failure["position"] for each in every for failure in each["failures"]]
    yield from same("keys at the positions of failures", [flat[at] for at in positions], [BAD] * len(positions))
    if not case.raises:
        yield from same("samples_failed", sum(each["samples_failed"] for each in every), bad if case.fails else 0)
    if not case.streams and case.sampler != "batches":
        yield from same("samples_expected", every[0]["samples_expected"], sum(map(len, order)))
    undisturbed = case.stay == "an epoch" and case.fault == case.interruption == "none"
    if case.data in FILES and case.workers > 0 and undisturbed:
        reads = parts[0].stats["reads"]
        yield from same("reads that failed, and reads by workers", (reads["failed"], reads["by_workers"]), (0, 0))
        if case.cache not in ("none", "little"):
            yield from same("reads, of what no epoch before had", reads["reads"], len(new))
    workers = [tuple(each["workers"][name] for name in ("died", "hung", "replaced")) for each in every]
    if case.interruption == "none" and case.fault.endswith(" twice"):
        more = bad if case.data == "many at once" else 0  # of samples that were fetched together nobody is blamed
        name = "died" if case.fault == "killed twice" else "hung"
        counts = every[0]["workers"]
        if not 2 * bad <= counts[name] == counts["replaced"] <= 2 * bad + more:
            yield f"workers: {counts}, should be {2 * bad} that {name} and were replaced"
    if not case.replaces:
        yield from same("workers that died, hung, and were replaced", workers, [(0, 0, 0)] * len(every))
