"""The output of an analysis: tables, and rows and profiles for ``--json``."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from minato_gpu.lab.analysis.breakdown import of_ranks, part_rows
from minato_gpu.lab.analysis.predict import answer
from minato_gpu.lab.analysis.profile import Profile
from minato_gpu.lab.analysis.script import Result
from minato_gpu.lab.analysis.verdict import verdict
from minato_gpu.lab.console import number, show
from minato_gpu.lab.report import write_whole
from minato_gpu.samples import JSON

if TYPE_CHECKING:
    from rich.console import Console

_SLOWEST = 5
_BAR = 20  # characters of the longest
_PAGE_WIDTH = 140  # characters


def rows(results: Sequence[Result]) -> list[dict[str, JSON]]:
    """Returns a row for each part of each rank's epoch."""
    return part_rows(of_ranks(_profiles(results)))


def more(results: Sequence[Result]) -> dict[str, JSON]:
    """Returns the document's entries ``verdict``, ``profiles`` and ``results`` (of each rank: how its script ended)."""
    profiles = _profiles(results)
    return {
        "verdict": verdict(profiles)._asdict(),
        "profiles": [asdict(profile) for profile in profiles],
        "results": [
            {"rank": each.rank, "status": each.status, "message": each.message, "loaders": list(each.loaders)}
            for each in results
        ],
    }


def problem(results: Sequence[Result]) -> str:
    """Returns why not everything could be measured, in a sentence; empty where it could."""
    own = results[0]
    how = {"ended": "the script ended", "died": "the script died"}
    said = how.get(own.status, "the analysis was stopped")
    if own.profile is None:
        return f"{said}{f' ({own.message})' if own.message else ''} {_never(own.loaders)}"
    if own.status == "complete":
        return ""
    missing = [name for name in ("compute", "warm") if name not in own.profile.phases]
    because = f": {own.message}" if own.message else ""
    lacks = f" (there is no {' and no '.join(missing)} phase)" if missing else ""
    more = "Give it more epochs or a larger data set, or fewer --seconds."
    return f"{said}{because} before all was measured{lacks}. {more}"


def _never(loaders: Sequence[str]) -> str:
    """Returns what to say if no loader was chosen."""
    if not loaders:
        return (
            "without iterating a torch.utils.data.DataLoader or a minato_gpu.DataLoader. (A loader in "
            "a process that the script starts is not seen; put analyze before that one.)"
        )
    said = "; ".join(loaders)
    return f"before a loader had given three batches with gradients enabled: {said}. (--loader N chooses one.)"


def whatif(results: Sequence[Result]) -> list[dict[str, JSON]]:
    """Returns other settings as predicted for the first rank, and as they ran where they were tried; none where the
    profile does not suffice."""
    own = results[0]
    if own.profile is None or not own.profile.suffices:
        return []
    return answer(own.profile, own.tried)


def show_answers(console: Console, answered: Sequence[Mapping[str, JSON]]) -> None:
    """Prints a table for each question: an epoch's seconds in each setting, also as a bar."""
    longest = max((row["high_s"] for row in answered), default=0.0)
    for question in dict.fromkeys(row["question"] for row in answered):
        shown = [
            {
                "setting": row["setting"] if isinstance(row["setting"], str) else number(row["setting"]),
                "": "#" * round(_BAR * row["epoch_s"] / longest),
                "epoch s": row["epoch_s"],
                "low": row["low_s"],
                "high": row["high_s"],
                "first epoch s": row["first_epoch_s"],
                "times faster": row["times_faster"],
                "measured s": row.get("measured_s"),
                "off by": f"{row['deviation']:+.1%}" if "deviation" in row else None,
                "verified": "as measured" if row["measured"] and "measured_s" not in row else row["verified"],
            }
            for row in answered
            if row["question"] == question
        ]
        show(console, str(question), shown)


def write_page(path: Path, what: str, document: Mapping[str, JSON], results: Sequence[Result]) -> None:
    """Writes all tables as one page for a browser, which needs nothing else."""
    from rich.console import Console

    console = Console(record=True, file=io.StringIO(), width=_PAGE_WIDTH)
    machine, versions = document["machine"], document["versions"]
    console.print(f"Where the time of {what} goes", style="bold", markup=False, highlight=False)
    where = f"{document['date']}, {machine['cores']} cores of {machine['processor']}"
    console.print(f"{where}; torch {versions.get('torch', 'unknown')}", markup=False, highlight=False)
    show_results(console, results)
    if document["whatif"]:
        console.print("\nAn epoch in other settings, predicted:", markup=False)
        show_answers(console, document["whatif"])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, console.export_html().encode())


def _profiles(results: Sequence[Result]) -> list[Profile]:
    return [result.profile for result in results if result.profile is not None]


def show_results(console: Console, results: Sequence[Result]) -> None:
    """Prints all tables, and the verdict; nothing if of no rank the parts of its epoch are known."""
    profiles = _profiles(results)
    parts = rows(results)
    if not parts:
        return
    show(console, "where an epoch's time goes", parts)
    show(console, "what was measured", [_measured(profile) for profile in profiles])
    first = profiles[0]
    if first.scaling:
        scaling = [{"workers": count, "samples_per_s": rate} for count, rate in first.scaling]
        show(console, "preparation, everything cached", scaling)
    if first.stages_s:
        stages = sorted(first.stages_s.items(), key=lambda each: -each[1])
        show(console, "cost by stage", [{"stage": name, "ms": seconds * 1e3} for name, seconds in stages])
    slowest = [{"ms": seconds * 1e3, "sample": what} for seconds, what in first.slowest[:_SLOWEST]]
    show(console, "slowest samples", slowest)
    for note in dict.fromkeys(note for profile in profiles for note in profile.notes):
        console.print(f"Note: {note}", markup=False, highlight=False)
    said = results[0].loaders
    if len(said) > 1:
        console.print(f"Of several loaders one was analysed: {'; '.join(said)}.", markup=False, highlight=False)
    console.print(verdict(profiles).sentence, style="bold", markup=False, highlight=False)


def _measured(profile: Profile) -> dict[str, JSON]:
    """One rank's figures in a row."""
    storage = profile.storage
    rates = {name: profile.batch_size / phase.each_s for name, phase in profile.phases.items() if phase.each_s > 0}
    middle = 1e3 * median(profile.prepare_s) if profile.prepare_s else None
    return {
        "rank": profile.rank,
        "workers": profile.workers,
        "G_per_s": rates.get("compute"),
        "warm_per_s": rates.get("warm"),
        "cold_per_s": rates.get("cold"),
        "sample ms": middle,
        "on cores": profile.prepare_cpu_share,
        "collate ms": profile.collate_s * 1e3,
        "KB a sample": None if storage is None else storage.nbytes / 1e3,
        "storage MB_per_s": None if storage is None else storage.bytes_per_s / 1e6,
        "latency ms": None if storage is None else storage.latency_s * 1e3,
    }
