"""What the page shows beside what was measured: predictions, as curves, as a table, and beside the measured epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from minato_gpu.analysis import page
from minato_gpu.analysis.drawings import Point
from minato_gpu.analysis.predict import DRAWS, predict
from minato_gpu.analysis.profile import Profile
from minato_gpu.analysis.questions import NOT, answer
from minato_gpu.samples import JSON

Rows = Sequence[Mapping[str, JSON]]
_NONE = "none"  # of a cache: the setting 0


def write(
    path: Path,
    what: str,
    profiles: Sequence[Profile],
    document: Mapping[str, JSON],
    draws: int = DRAWS,
    answered: Rows | None = None,
) -> None:
    """The page on these ranks, with what the first one's profile answers: ``answered``, where that is known already.
    See ``page.write``."""
    rows = _answered(profiles[0], draws) if answered is None else answered
    curves, others = _curves(profiles[0], rows)
    page.write(path, what, profiles, document, curves, _compared(profiles[0], rows, draws), others)


def _answered(profile: Profile, draws: int) -> list[dict[str, JSON]]:
    """Nothing where the profile does not suffice."""
    return answer(profile, draws=draws) if profile.suffices else []


def _curves(profile: Profile, rows: Rows) -> tuple[list[page.Curve], page.Rows]:
    """Questions whose settings are numbers, and rows for a table of the others."""
    curves: list[page.Curve] = []
    others: list[dict[str, str]] = []
    measured_s = _epoch_s(profile, "cold") or _epoch_s(profile, "warm")
    for question in dict.fromkeys(row["question"] for row in rows):
        some = [row for row in rows if row["question"] == question]
        values = [_number(row["setting"]) for row in some]
        if None in values or len(some) < 2:
            others += [_other(row) for row in some]
            continue
        points = [
            Point(float(value or 0), row["epoch_s"], row["low_s"], row["high_s"])
            for value, row in zip(values, some, strict=True)
        ]
        at = next((point.at for point, row in zip(points, some, strict=True) if row["measured"]), None)
        measured = {} if at is None or measured_s is None else {at: measured_s}
        tried = zip(points, (row.get("measured_s") for row in some), strict=True)
        measured |= {point.at: seconds for point, seconds in tried if seconds is not None}
        unverified = sorted({row["verified"] for row in some if str(row["verified"]).startswith(NOT)})
        curves.append(page.Curve(question, sorted(points), sorted(measured.items()), "; ".join(unverified)))
    return curves, others


def _other(row: Mapping[str, JSON]) -> dict[str, str]:
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


def _compared(profile: Profile, answered: Sequence[Mapping[str, JSON]], draws: int) -> page.Rows:
    """The phases as the model has them."""
    as_measured = next((row for row in answered if row["measured"]), None)
    if as_measured is None:
        return []
    warm, cold = _epoch_s(profile, "warm"), _epoch_s(profile, "cold")
    rows = []
    if warm is not None:
        found = as_measured if profile.storage is None else asdict(predict(replace(profile, storage=None), draws=draws))
        rows.append(_beside("bytes in memory", found, warm))
    if cold is not None and profile.storage is not None:
        rows.append(_beside("bytes in storage", as_measured, cold))
    return rows


def _beside(epoch: str, found: Mapping[str, JSON], measured_s: float) -> dict[str, str]:
    return {
        "epoch": epoch,
        "predicted, s": f"{found['epoch_s']:.3g} ({found['low_s']:.3g} to {found['high_s']:.3g})",
        "measured, s": f"{measured_s:.3g}",
        "error": f"{found['epoch_s'] / measured_s - 1:+.1%}",
    }
