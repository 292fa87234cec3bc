"""``minato-gpu whatif``: predictions against what can be worked out by hand, and a line for what makes no sense."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from minato_gpu.lab.analysis import questions
from minato_gpu.lab.analysis.predict import Predictor
from minato_gpu.lab.analysis.profile import Profile, Storage
from minato_gpu.lab.analysis.virtual_epochs import Shuffles
from minato_gpu.lab.cli import main
from tests.lab.analysis.conftest import a_profile

PREPARE_S = 0.64  # 128 samples of 10 ms, two workers
COMPUTES: dict[str, Any] = {"prepare_cpu_share": 1.0, "cores": 2}
APART: dict[str, Any] = {"overlap": False, "shards": 2}  # nothing of an epoch is in memory from the one before
RATES: dict[str, Any] = {"scaling": ((1, 78.0), (2, 150.0), (4, 280.0))}  # samples per second of so many workers
HALF_CACHED = Storage(5e6, 1e-4, 1.0, 1e5, 16.0, cached_share=0.5)

Rows = list[dict[str, Any]]
Ask = Callable[..., Rows]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Rows of the document for a profile with these changes, from one draw: what is asked, not how sure it is."""
    monkeypatch.setattr(questions, "answer", partial(questions.answer, draws=1))

    def rows(options: str = "", **changes: Any) -> Rows:
        path = tmp_path / "profile.json"
        path.write_text(json.dumps(asdict(a_profile(**changes))))
        done = CliRunner().invoke(main, ["whatif", str(path), *shlex.split(options), "--json", "-"])
        assert done.exit_code == 0, done.output
        found: Rows = json.loads(done.stdout)["rows"]
        return found

    return rows


class Known(NamedTuple):
    """``epoch_s``: what comes out for a profile with these changes and these options."""

    epoch_s: float
    options: str = "--workers 2"
    changes: dict[str, Any] = {}  # noqa: RUF012 -- nobody changes them
    within: float = 0.06


KNOWN: dict[str, Known] = {
    "workers bound the epoch": Known(PREPARE_S),
    "one worker has all the work": Known(2 * PREPARE_S, "--workers 1"),
    "workers that wait go on scaling": Known(PREPARE_S / 4, "--workers 8"),
    "workers that compute have no more than their cores": Known(PREPARE_S, "--workers 4", COMPUTES),
    "fewer cores": Known(2 * PREPARE_S, "--cores 1", COMPUTES),
    "more cores and workers": Known(PREPARE_S / 4, "--cores 8 --workers 8", COMPUTES, 0.1),
    "a step that computes takes cores": Known(
        0.73, "--workers 2", {**COMPUTES, "step_s": (0.01,), "step_cpu_share": 1.0}
    ),
    "a rate that was measured, 1": Known(128 / 78, "--workers 1", RATES),
    "a rate that was measured, 4": Known(128 / 280, "--workers 4", RATES),
    "a long step is the epoch": Known(1.6016, "--step-ms 100", {}, 0.01),
    "without workers a step waits for its batch": Known(
        2 * PREPARE_S + 16 * 0.1001, "--step-ms 100", {"workers": 0, "loader": "torch", "storage": None}, 0.01
    ),
    "this loader without workers": Known(
        2 * PREPARE_S + 16 * 0.1001, "--step-ms 100", {"workers": 0, "storage": None}, 0.01
    ),
    "a step waits for its batch's transfer": Known(16 * 0.1201, "--step-ms 100", {"transfer_s": 0.02}, 0.01),
    "slow storage is the epoch": Known(1.28, "--rate-mb 10", APART),
    "a cache mends it": Known(PREPARE_S, "--rate-mb 10 --cache 1.2", APART, 0.1),
    "a page cache that has half": Known(1.28, "--workers 2", {**APART, "storage": HALF_CACHED}, 0.15),
    "reading ahead hides latency": Known(PREPARE_S + 0.07, "--latency-ms 50", APART, 0.1),
    "torch's workers wait for latency": Known(6 * PREPARE_S, "--loader torch --latency-ms 50", APART, 0.1),
    "torch's workers share the storage": Known(2.56, "--loader torch --rate-mb 5 --workers 8", {}, 0.15),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_can_be_worked_out_comes_out(ask: Ask, name: str) -> None:
    known = KNOWN[name]
    _, found = ask(known.options, **known.changes)
    assert found["epoch_s"] == pytest.approx(known.epoch_s, rel=known.within)
    assert found["low_s"] <= found["epoch_s"] <= found["high_s"]


def _seconds(ask: Ask, options: str = "--workers 2", **changes: Any) -> float:
    return float(ask(options, **changes)[1]["epoch_s"])


def test_what_order_costs_is_no_part_of_what_a_slot_takes(ask: Ask) -> None:
    """One sample in 64 takes 40 times as long: eight workers lose much of their rate to it, which others need not."""
    uneven: dict[str, Any] = {"samples": 256, "workers": 8, "prefetch": 1, "prepare_s": ((0.005,) * 63 + (0.2,)) * 4}
    rate = 256 / _seconds(ask, "--workers 8", **uneven)
    assert 8 / rate > 1.5 * 0.00805  # seconds that a slot had for each, where preparing takes 8.05 ms
    again = _seconds(ask, "--workers 8", **uneven, scaling=((8, rate),))
    assert 256 / again == pytest.approx(rate, rel=0.04)


@pytest.mark.parametrize(
    ("change", "longer_s"),
    [({}, 0.0), ({"step_s": (0.1,)}, 0.05), ({"overlap": False}, 0.05)],
    ids=["workers go on", "the step is the epoch", "epochs apart"],
)
def test_what_is_done_between_epochs(ask: Ask, change: dict[str, Any], longer_s: float) -> None:
    """It keeps the consumer 50 ms, in which workers go on if they may."""
    found = _seconds(ask, **change, between_s=0.05) - _seconds(ask, **change)
    assert found == pytest.approx(longer_s, abs=0.012)


def test_a_cache_that_keeps_more_is_faster_and_one_that_knows_the_orders_is_the_fastest(ask: Ask) -> None:
    slow: dict[str, Any] = {"overlap": False, "shards": 4}
    policies = {name: _seconds(ask, f"--rate-mb 5 --cache 0.25 --policy {name}", **slow) for name in ("minio", "lru")}
    best = _seconds(ask, "--rate-mb 5 --cache 0.25 --policy next-use", **slow)
    assert best < 0.85 * min(policies.values())
    more = _seconds(ask, "--rate-mb 5 --cache 0.5 --policy minio", **slow)
    assert more < policies["minio"] < _seconds(ask, "--rate-mb 5", **slow)


def test_ranks_share_the_samples_the_storage_and_the_cores(ask: Ask) -> None:
    computes: dict[str, Any] = {"prepare_cpu_share": 1.0, "cores": 4}
    one, two, four = (_seconds(ask, f"--ranks {ranks}", **computes) for ranks in (1, 2, 4))
    assert two == pytest.approx(one / 2, rel=0.15)  # two cores for two workers
    assert four > 0.9 * two  # one core for two workers: half the samples, at half the speed
    one, eight = (_seconds(ask, f"--ranks {ranks}", prepare_cpu_share=1.0, cores=2) for ranks in (1, 8))
    assert eight > 0.9 * one  # a quarter of a core for each: an eighth of the samples, at an eighth of the speed
    slow = Storage(50e5, 1e-3, 1.0, 1e5, 16.0, remote=True)  # of 50 samples a second, a quarter of what two prepare
    assert _seconds(ask, "--ranks 2", storage=slow, overlap=False) == pytest.approx(128 / 50, rel=0.15)


def test_the_usual_questions_have_the_measured_point_once_and_say_what_cannot_be_run_here(ask: Ask) -> None:
    found = ask(samples=32)
    names = dict.fromkeys(row["question"] for row in found)
    assert len(names) == 10 and {"workers", "step, times", "batch size", "loader", "cores"} <= names.keys()
    for name in names:
        some = [row for row in found if row["question"] == name]
        assert len([row for row in some if row["measured"]]) == ("cache policy" not in name), name
        assert len({row["setting"] for row in some}) == len(some) > 1
    assert all(row["epoch_s"] > 0 and row["times_faster"] > 0 for row in found)
    unlike = {row["question"] for row in found if row["verified"].startswith("not verifiable here")}
    assert {name.split(",")[0].removesuffix(" of this host") for name in unlike} == {
        *("cores", "cache of this loader", "cache policy", "storage rate", "storage latency", "step", "ranks")
    }
    assert not any("cache" in row["question"] or "storage" in row["question"] for row in ask(samples=32, storage=None))


def test_a_range_is_a_curve_and_one_value_holds_for_all(ask: Ask) -> None:
    found = ask("--workers 1-4 --step-ms 0.5", samples=32)
    assert [(row["question"], row["setting"]) for row in found] == [
        ("as measured", ""),
        *(("workers", count) for count in (1, 2, 4)),
    ]
    assert found[3]["epoch_s"] < found[2]["epoch_s"] < found[1]["epoch_s"]
    assert [row["setting"] for row in ask("--cache 0-1", samples=32)[1:]] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    slow = ask("--cache 0.5 --rate-mb 1 --latency-ms 20 --policy lru", samples=32)
    assert slow[1]["setting"] == "cache 0.5, rate mb 1, latency ms 20, lru" and slow[1]["epoch_s"] > slow[0]["epoch_s"]


# --- what is shown, and what is no question -------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file with a small profile."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(asdict(a_profile(samples=32))))
    return path


def test_it_is_shown_as_a_table_the_same_each_time(saved: Path) -> None:
    done = [CliRunner().invoke(main, ["whatif", str(saved), "--loader", "torch"]) for _ in range(2)]
    assert done[0].exit_code == 0, done[0].output
    assert "faster" in done[0].output and "torch" in done[0].output and done[0].output == done[1].output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "none"], "no number"),
        (["--workers", "4-1"], "no range"),
        (["--workers", "0"], "makes no sense"),
        (["--policy", "lru"], "give --cache too"),
        (["--loader", "torch", "--cache", "0.5"], "cache in memory"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_line(saved: Path, arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["whatif", str(saved), *arguments])
    assert done.exit_code in (1, 2) and said in done.output and "Traceback" not in done.output


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"storage": None}, "no read was seen"), ({"prepare_s": ()}, "no sample"), ({"step_s": ()}, "no step")],
)
def test_what_the_profile_does_not_know_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(asdict(a_profile(**changes))))
    done = CliRunner().invoke(main, ["whatif", str(path), "--latency-ms", "100"])
    assert done.exit_code == 1 and said in done.output


def test_orders_of_more_samples_than_the_profile_knows_are_refused(profile: Profile) -> None:
    with pytest.raises(ValueError, match="name sample 255, and the profile knows of 128"):
        Predictor(profile, Shuffles(256, 1, 0))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"loader": "torch"}', "\0", "[1]"])
def test_another_file_is_no_profile(saved: Path, content: str) -> None:
    saved.write_text(content)
    done = CliRunner().invoke(main, ["whatif", str(saved)])
    assert done.exit_code == 1 and "no profile" in done.output
