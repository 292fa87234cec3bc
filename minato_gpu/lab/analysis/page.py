"""The analysis as a page that one opens in a browser: one file that needs nothing else, pictures drawn in it.

Decision: drawings in SVG and no library for charts that move. The page stays below a megabyte (such libraries bring one
to five themselves), runs no script, prints, and says in words and tables what pictures show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from minato_gpu.lab.analysis import drawings
from minato_gpu.lab.analysis.breakdown import TITLES, Breakdown, of_ranks, part_rows
from minato_gpu.lab.analysis.predict import DRAWS, Predictor
from minato_gpu.lab.analysis.preparation import law_of
from minato_gpu.lab.analysis.profile import Phase, Profile
from minato_gpu.lab.analysis.questions import CACHE_POLICY, NO_CACHE, NOT, POLICIES, answer
from minato_gpu.lab.analysis.verdict import WORTH, verdict
from minato_gpu.lab.numbers import number
from minato_gpu.lab.report import write_whole
from minato_gpu.samples import JSON
from minato_gpu.util.messages import from_extra

Rows = Sequence[Mapping[str, str]]
Row = Mapping[str, JSON]
"""A row of ``questions.answer``, or ``questions.compared``."""
_PARTS = (
    "Compute is the training step by itself. A preparation stall is a wait for samples whose bytes are in memory; "
    "a fetch stall is a wait for their bytes."
)
_PHASES = (
    "Each batch as it was measured. Sight: the first ones of the loader; compute: batches that are there already; "
    "warm: from the loader, with all files in memory; cold: with all files in storage; prepare: without the training "
    "step."
)


class Figure(NamedTuple):
    """A picture; ``said``: in words; ``rows``: in figures."""

    title: str
    svg: str
    said: str
    rows: Rows = ()


class Section(NamedTuple):
    """A part of the page; ``remarks``: sentences below its pictures and tables."""

    title: str
    text: str
    figures: Sequence[Figure] = ()
    tables: Sequence[tuple[str, Rows]] = ()
    remarks: Sequence[str] = ()


def check() -> None:
    """Raises ModuleNotFoundError without what the extra ``report`` brings."""
    with from_extra("report"):
        import jinja2  # noqa: F401
        import matplotlib.figure  # noqa: F401


def write(
    path: Path,
    what: str,
    profiles: Sequence[Profile],
    document: Mapping[str, JSON],
    draws: int = DRAWS,
    answered: Sequence[Row] | None = None,
) -> None:
    """Writes the page on ``what`` was analysed, with what the first rank's profile predicts, if it suffices for that.

    ``document``: of report.py, for date, machine and versions. ``answered``: the predictions, where they are known.
    Raises OSError where ``path`` cannot be written.
    """
    from jinja2 import Environment, StrictUndefined

    first = profiles[0]
    if answered is None:
        answered = answer(first, draws=draws) if first.suffices else []
    predicted = [what_if(first, answered), _compared(first, answered, draws)]
    sections = [part for part in _sections(profiles, predicted) if part.figures or part.tables or part.remarks]
    text = (
        Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
        .from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
        .render(
            title=f"Where the time of {what} goes",
            where=_where(document),
            verdict=verdict(profiles).sentence,
            notes=list(dict.fromkeys(note for profile in profiles for note in profile.notes)),
            sections=sections,
            version=document["versions"].get("minato-gpu", ""),
            kilobytes=sum(len(figure.svg) for part in sections for figure in part.figures) // 1000,
        )
    )
    write_whole(path, text)


def _where(document: Mapping[str, JSON]) -> str:
    machine, torch = document["machine"], document["versions"].get("torch", "unknown")
    gpus = ", ".join(map(str, machine["gpus"])) or "no GPU"
    return f"{document['date']}, {machine['cores']} cores of {machine['processor']}, {gpus}; torch {torch}"


def _sections(profiles: Sequence[Profile], predicted: Sequence[Section]) -> list[Section]:
    found = of_ranks(profiles)
    first = profiles[0]
    costs = [_costs(first)] if first.prepare_s else []
    if first.stages_s:
        costs.append(_stages(first.stages_s))
    if len(first.scaling) > 1:
        costs.append(_workers(first))
    slowest = [{"sample": name, "ms": number(1e3 * seconds)} for seconds, name in first.slowest]
    timed = {name: phase for name, phase in first.phases.items() if phase.batch_s}
    return [
        Section("Where an epoch's time goes", _PARTS, [_breakdown(found)] if found else []),
        *predicted,
        Section("What samples cost", "", costs, [("the slowest samples that were seen", slowest)] if slowest else []),
        Section("Batch by batch", _PHASES, [_batches(timed)] if timed else []),
    ]


def _breakdown(found: Sequence[tuple[Profile, Breakdown]]) -> Figure:
    bars = [(profile.rank, {name: part.share for name, part in parts.parts.items()}) for profile, parts in found]
    rank, shares = bars[0]
    said = ", ".join(f"{TITLES[name]} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    return Figure("Shares", drawings.breakdown(bars), f"Of an epoch of rank {rank}: {said}.", part_rows(found))


def _costs(profile: Profile) -> Figure:
    ordered = sorted(profile.prepare_s)
    quantiles = {
        name: 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        for name, share in (("median", 0.5), ("95 in 100", 0.95), ("99 in 100", 0.99), ("slowest", 1.0))
    }
    said = f"Of {len(ordered)} samples the middle one took {number(quantiles['median'])} ms, the slowest "
    rows = [{"share": name, "at most, ms": number(value)} for name, value in quantiles.items()]
    return Figure("Samples", drawings.costs(ordered), f"{said}{number(quantiles['slowest'])} ms.", rows)


def _stages(seconds: Mapping[str, float]) -> Figure:
    name, most = max(seconds.items(), key=lambda each: each[1])
    rows = [{"stage": stage, "ms a sample": number(1e3 * value)} for stage, value in seconds.items()]
    return Figure("Stages", drawings.stages(seconds), f"{name} takes most: {number(1e3 * most)} ms a sample.", rows)


def _workers(profile: Profile) -> Figure:
    law = law_of(profile)
    rows = [{"workers": str(count), "samples/s": f"{rate:,.0f}"} for count, rate in profile.scaling]
    said = ", ".join(f"{rate:,.0f} samples/s with {count}" for count, rate in profile.scaling)
    return Figure("Workers", drawings.workers(profile.scaling, None if law is None else law.rate), f"{said}.", rows)


def _batches(phases: Mapping[str, Phase]) -> Figure:
    said = ", ".join(f"{name} {number(1e3 * each.each_s)} ms" for name, each in phases.items())
    return Figure("Time from batch to batch", drawings.batches(phases), f"On average: {said}.")


# --- what changes would bring --------------------------------------------------------------------------------------


def what_if(profile: Profile, rows: Sequence[Row]) -> Section:
    """A curve for each question whose settings are numbers, or a sentence where it is flat; a table of the others."""
    figures: list[Figure] = []
    others: list[dict[str, str]] = []
    remarks: list[str] = []
    measured_s = _epoch_s(profile, "cold") or _epoch_s(profile, "warm")
    for question in dict.fromkeys(row["question"] for row in rows):
        some = [row for row in rows if row["question"] == question]
        points = {value: row for row in some if (value := _value(row["setting"])) is not None}
        if not len(points) == len(some) > 1:
            others += [_other(row) for row in some]
            continue
        points = dict(sorted(points.items()))
        tried = {at: row.get("measured_s", measured_s if row["measured"] else None) for at, row in points.items()}
        measured = {at: seconds for at, seconds in tried.items() if seconds is not None}
        flat = _flat(question, points, measured)
        if flat:
            remarks.append(flat)
        else:
            figures.append(_curve(question, points, measured))
    named = {str(row["setting"]) for row in rows if row["question"] == CACHE_POLICY}
    remarks += [f"{policy}: a cache that {does}." for policy, does in POLICIES.items() if policy in named]
    return Section(
        "What if",
        "Predicted by this loader's scheduler and cache policies under a virtual clock, with the costs that were "
        "measured; the band holds nine of ten draws of them.",
        figures,
        [("other settings", others)] if others else [],
        remarks,
    )


def _flat(question: str, points: Mapping[float, Row], measured: Mapping[float, float]) -> str:
    """A sentence in the place of a curve that changes neither as predicted nor as measured; empty for one that does."""
    predicted = [row["epoch_s"] for row in points.values()]
    found = list(measured.values())
    for seconds in filter(None, (predicted, found)):
        if max(seconds) - min(seconds) >= WORTH * max(seconds):
            return ""
    asked = f"{question}, from {number(min(points))} to {number(max(points))}"
    said = f"{asked}: makes no difference, an epoch is predicted to take {_range(predicted)}"
    return f"{said}; {_range(found)} measured." if found else f"{said}."


def _range(seconds: Sequence[float]) -> str:
    low, high = number(min(seconds)), number(max(seconds))
    return f"{low} s" if low == high else f"{low} to {high} s"


def _curve(question: str, points: Mapping[float, Row], measured: Mapping[float, float]) -> Figure:
    """Draws an epoch's seconds over the values asked for. ``measured``: those of an epoch that was run."""
    ends = (min(points), max(points))
    said = " and ".join(f"{number(points[at]['epoch_s'])} s ({question}: {number(at)})" for at in ends)
    if measured:
        found = " and ".join(f"{number(seconds)} s ({number(at)})" for at, seconds in measured.items())
        said += f"; {found} were measured"
    rows = [
        {
            question: number(at),
            "epoch, s": number(row["epoch_s"]),
            "from": number(row["low_s"]),
            "to": number(row["high_s"]),
            "measured, s": number(measured[at]) if at in measured else "",
        }
        for at, row in points.items()
    ]
    whys = "; ".join(sorted({row["verified"] for row in points.values() if str(row["verified"]).startswith(NOT)}))
    unverified = f" ({whys}, but as measured.)" if whys else ""
    svg = drawings.curve(points, question, measured)
    return Figure(question, svg, f"An epoch is predicted to take {said}.{unverified}", rows)


def _other(row: Row) -> dict[str, str]:
    setting = row["setting"]
    return {
        "question": row["question"],
        "setting": setting if isinstance(setting, str) else number(setting),
        "epoch, s": _interval(row),
        "times as fast": f"{row['times_faster']:.2f}",
        "measured, s": number(row["measured_s"]) if row.get("measured_s") else "",
        "": "as measured" if row["measured"] else row["verified"],
    }


def _interval(row: Row) -> str:
    """The predicted seconds of an epoch, and their bounds."""
    return f"{number(row['epoch_s'])} ({number(row['low_s'])} to {number(row['high_s'])})"


def _value(setting: JSON) -> float | None:
    """The setting as a place on an axis; None for a word."""
    if setting == NO_CACHE:
        return 0.0
    return None if isinstance(setting, str) else setting


def _epoch_s(profile: Profile, name: str) -> float | None:
    """Returns the seconds of an epoch whose batches take as long as those of this phase."""
    phase = profile.phases.get(name)
    return None if phase is None or not phase.batches else phase.each_s * profile.batches


def _compared(profile: Profile, answered: Sequence[Row], draws: int) -> Section:
    """The phases as the model has them."""
    as_measured = next((row for row in answered if row["measured"]), None)
    warm, cold = _epoch_s(profile, "warm"), _epoch_s(profile, "cold")
    rows = []
    if as_measured is not None and warm is not None:
        in_memory = Predictor(replace(profile, storage=None))
        found = as_measured if profile.storage is None else asdict(in_memory.predict(draws=draws))
        rows.append(_beside("bytes in memory", found, warm))
    if as_measured is not None and cold is not None and profile.storage is not None:
        rows.append(_beside("bytes in storage", as_measured, cold))
    tables = [("epochs of the run as it is", rows)] if rows else []
    return Section("Predicted against measured", "", tables=tables)


def _beside(epoch: str, found: Row, measured_s: float) -> dict[str, str]:
    return {
        "epoch": epoch,
        "predicted, s": _interval(found),
        "measured, s": number(measured_s),
        "error": f"{found['epoch_s'] / measured_s - 1:+.1%}",
    }
