"""``minato-gpu whatif``: what an epoch would take in other settings than the one that was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from minato_gpu.lab.commands.common import CommandOutput, shows
from minato_gpu.lab.numbers import number

if TYPE_CHECKING:
    from minato_gpu.lab.analysis.profile import Profile, Setting
    from minato_gpu.lab.analysis.questions import Point


class _Asked(NamedTuple):
    """What an option asks: the field of ``Setting``, and the factor of its values (None: whole numbers)."""

    field: str
    times: float | None
    help: str


_ASKED = {
    "workers": _Asked("workers", None, "Worker processes."),
    "cores": _Asked("cores", None, "Cores for this rank."),
    "batch_size": _Asked("batch_size", None, "Samples of a batch; a step takes as much longer."),
    "ranks": _Asked("ranks", None, "Ranks that share the data set, the storage and the cores."),
    "cache": _Asked("cache", 1.0, "Share of the set that a cache in memory may keep."),
    "rate_mb": _Asked("bytes_per_s", 1e6, "Storage, MB/s."),
    "latency_ms": _Asked("latency_s", 1e-3, "Storage, milliseconds of a request."),
    "step_ms": _Asked("step_s", 1e-3, "Milliseconds of a training step."),
}


def _options(function: Callable[..., None]) -> Callable[..., None]:
    for name, asked in reversed(_ASKED.items()):
        function = click.option(f"--{name.replace('_', '-')}", name, metavar="RANGE", help=asked.help)(function)
    return function


@click.command(short_help="What an epoch would take in other settings.")
@click.argument("profile", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PROFILE.json")
@_options
@click.option(
    "--policy",
    type=click.Choice(["minio", "next-use", "lru"]),
    help="What the cache keeps: minio what comes first; next-use what is needed soonest; lru what was used last. "
    "The loader chooses if not given.",
)
@click.option(
    "--loader", type=click.Choice(["torch", "minato_gpu"]), help="Predict for this loader instead of the script's."
)
@click.option("--rank", type=click.IntRange(min=0), default=0, help="Rank to predict, of a file with several.")
@shows
def whatif(
    out: CommandOutput, /, profile: Path, policy: str | None, loader: str | None, rank: int, **ranges: str | None
) -> None:
    """Predict the epoch of a measured training script in other settings.

    PROFILE.json is what `minato-gpu analyze` leaves. RANGE is a number (8), a list (1,2,4) or a range (1-16); what has
    one value holds for all others. Without any option the usual questions are answered.

    The measured costs go through the scheduler and the cache policies of the loader under a virtual clock; low and high
    hold nine of ten draws of these costs.
    """
    from minato_gpu.lab.analysis import questions, tables

    found = _read(profile, rank)
    try:
        chosen = _points(found, policy or "", loader, ranges)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    with out.console.status("simulating"):
        rows = questions.answer(found, chosen=chosen)
    tables.show_answers(out.console, rows)
    out.leave_rows({"command": "whatif", "loader": found.loader, "rank": found.rank}, rows)


def _read(path: Path, rank: int) -> Profile:
    """A profile, alone or one of ``profiles``. Raises ValueError for another thing."""
    from minato_gpu.lab.analysis.profile import profile_from

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise TypeError("it holds no figures by name")
        if "profiles" in data:
            of_rank = [each for each in data["profiles"] if each["rank"] == rank]
            if not of_rank:
                raise ValueError(f"{path}: there is no rank {rank}")
            data = of_rank[0]
        return profile_from(data)
    except (TypeError, KeyError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no profile that minato-gpu analyze has left: {error}") from error


def _points(profile: Profile, policy: str, loader: Any, ranges: Mapping[str, str | None]) -> list[Point] | None:
    """Returns what is asked for; None if nothing is named."""
    from minato_gpu.lab.analysis.profile import Setting
    from minato_gpu.lab.analysis.questions import Point, parsed_range

    values = {
        name: parsed_range(text, whole=_ASKED[name].times is None) for name, text in ranges.items() if text is not None
    }
    if policy and "cache" not in values:
        raise ValueError("--policy is that of a cache: give --cache too")
    if not values and loader is None:
        return None
    base = Setting(policy=policy, loader=loader)
    for name, some in values.items():
        if len(some) == 1:
            base = _with(base, name, some[0])
    curves = {name: some for name, some in values.items() if len(some) > 1}
    said = f"predicted from {len(profile.prepare_s)} samples"
    points = [Point("as measured", "", Setting(), True, said)]
    if not curves:
        singles = [f"{name.replace('_', ' ')} {number(some[0])}" for name, some in values.items()]
        asked_for = ", ".join([*singles, *filter(None, (loader, policy))])
        return [*points, Point("as asked for", asked_for, base, False, said)]
    for name, some in curves.items():
        points += [Point(name.replace("_", " "), value, _with(base, name, value), False, said) for value in some]
    return points


def _with(setting: Setting, name: str, value: float) -> Setting:
    asked = _ASKED[name]
    changed: dict[str, Any] = {asked.field: int(value) if asked.times is None else value * asked.times}
    return replace(setting, **changed)
