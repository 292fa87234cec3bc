"""What the page shows beside what was measured: predictions, as curves, as a table, and beside the measured epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from minato_gpu.lab.analysis import drawings, page
from minato_gpu.lab.analysis.predict import DRAWS, Predictor
from minato_gpu.lab.analysis.profile import Profile
from minato_gpu.lab.analysis.questions import NOT, answer
from minato_gpu.samples import JSON

Row = Mapping[str, JSON]
"""Of ``questions.answer``, or ``questions.compared``."""
_NONE = "none"  # of a cache: the setting 0


def write(
    path: Path,
    what: str,
    profiles: Sequence[Profile],
    document: Mapping[str, JSON],
    draws: int = DRAWS,
    answered: Sequence[Row] | None = None,
) -> None:
    """The page on these ranks, with what the first one's profile answers: ``answered``, where that is known already.
    Where the profile does not suffice there is nothing. See ``page.write``."""
    first = profiles[0]
    if answered is None:
        answered = answer(first, draws=draws) if first.suffices else []
    page.write(path, what, profiles, document, [what_if(first, answered), _compared(first, answered, draws)])


def what_if(profile: Profile, rows: Sequence[Row]) -> page.Section:
    """A curve for each question whose settings are numbers, and a table of the others."""
    figures: list[page.Figure] = []
    others: list[dict[str, str]] = []
    measured_s = _epoch_s(profile, "cold") or _epoch_s(profile, "warm")
    for question in dict.fromkeys(row["question"] for row in rows):
        some = [row for row in rows if row["question"] == question]
        points = {value: row for row in some if (value := _number(row["setting"])) is not None}
        if len(points) == len(some) > 1:
            figures.append(_curve(question, dict(sorted(points.items())), measured_s))
        else:
            others += [_other(row) for row in some]
    return page.Section(
        "What if",
        "Predicted by this loader's scheduler and cache policies under a virtual clock, with the costs that were "
        "measured; the band holds nine of ten draws of them.",
        figures,
        [("other settings", others)] if others else [],
    )


def _curve(question: str, points: Mapping[float, Row], measured_s: float | None) -> page.Figure:
    """What the question is answered by: an epoch over what is asked. ``measured_s``: an epoch of the run as it was."""
    tried = {at: row.get("measured_s", measured_s if row["measured"] else None) for at, row in points.items()}
    measured = {at: seconds for at, seconds in tried.items() if seconds is not None}
    said = " and ".join(f"{points[at]['epoch_s']:.3g} s ({question}: {at:g})" for at in (min(points), max(points)))
    if measured:
        said += f"; {' and '.join(f'{seconds:.3g} s ({at:g})' for at, seconds in measured.items())} were measured"
    rows = [
        {
            question: f"{at:g}",
            "epoch, s": f"{row['epoch_s']:.3g}",
            "from": f"{row['low_s']:.3g}",
            "to": f"{row['high_s']:.3g}",
            "measured, s": f"{measured[at]:.3g}" if at in measured else "",
        }
        for at, row in points.items()
    ]
    whys = "; ".join(sorted({row["verified"] for row in points.values() if str(row["verified"]).startswith(NOT)}))
    unverified = f" ({whys}, but as measured.)" if whys else ""
    svg = drawings.curve(points, question, measured)
    return page.Figure(question, svg, f"An epoch is predicted to take {said}.{unverified}", rows)


def _other(row: Row) -> dict[str, str]:
    return {
        "question": row["question"],
        "setting": row["setting"],
        "epoch, s": f"{row['epoch_s']:.3g} ({row['low_s']:.3g} to {row['high_s']:.3g})",
        "times as fast": f"{row['times_faster']:.2f}",
        "measured, s": f"{row['measured_s']:.3g}" if row.get("measured_s") else "",
        "": "as measured" if row["measured"] else row["verified"],
    }


def _number(text: str) -> float | None:
    try:
        return 0.0 if text == _NONE else float(text)
    except ValueError:
        return None


def _epoch_s(profile: Profile, name: str) -> float | None:
    """Of an epoch as long as the batches of this phase took."""
    phase = profile.phases.get(name)
    return None if phase is None or not phase.batches else phase.each_s * profile.batches


def _compared(profile: Profile, answered: Sequence[Row], draws: int) -> page.Section:
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
    return page.Section("Predicted against measured", "", tables=tables)


def _beside(epoch: str, found: Row, measured_s: float) -> dict[str, str]:
    return {
        "epoch": epoch,
        "predicted, s": f"{found['epoch_s']:.3g} ({found['low_s']:.3g} to {found['high_s']:.3g})",
        "measured, s": f"{measured_s:.3g}",
        "error": f"{found['epoch_s'] / measured_s - 1:+.1%}",
    }
