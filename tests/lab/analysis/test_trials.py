"""Other settings that are really run: in which order, what becomes of those that cannot be, what an epoch came to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from minato_gpu.lab.analysis.phases import SHARES, TimeBox
from minato_gpu.lab.analysis.predict import answer, points
from minato_gpu.lab.analysis.profile import LoaderKind, Profile, Setting, Trial
from minato_gpu.lab.analysis.trials import Trials
from tests.lab.analysis.conftest import a_profile

BATCHES = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
STEP_S = 2.0


class Subject:
    """Its loaders take a second for each sample; ``first_s`` more for the first batch."""

    def __init__(self, keys: Sequence[list[int]] = BATCHES, first_s: float = 0.0) -> None:
        self.keys, self.first_s, self.batch_size = keys, first_s, 4
        self.loader = SimpleNamespace(dataset=SimpleNamespace())
        self.now = 0.0
        self.made: list[Setting] = []
        self.taken: list[int] = []
        self.refuses: Callable[[Setting], None] = lambda setting: None

    def like(self, workers: int | None, kind: LoaderKind | None) -> Any:
        setting = Setting(kind, workers)
        self.refuses(setting)
        self.made.append(setting)
        subject = self

        class Loader:
            def __iter__(self) -> Iterator[list[int]]:
                subject.now += subject.first_s
                subject.taken.append(0)
                for batch in subject.keys:
                    subject.now += len(batch)
                    subject.taken[-1] += 1
                    yield batch

        return Loader()


def _tried(subject: Subject, profile: Profile) -> tuple[Trials, int]:
    """Trials that have run, with steps of two seconds, and how often they were saved."""

    def step_s() -> float:
        subject.now += STEP_S
        return STEP_S

    findings: Any = SimpleNamespace(subject=subject, batches_seen=4, files=[])
    saved: list[int] = []
    tried = Trials(findings, profile, 1e6, lambda: saved.append(1), lambda: subject.now)
    for _ in tried.batches(step_s):
        pass
    return tried, len(saved)


@pytest.fixture
def small() -> Profile:
    return a_profile(samples=16, batch_size=4, workers=0, storage=None, persistent=False, cores=1)


def test_every_setting_is_tried_once_and_the_run_as_it_is_first(small: Profile) -> None:
    subject = Subject()
    _, saved = _tried(subject, small)
    order = subject.made
    assert set(order) == {point.setting for point in points(small) if point.runs_here} and order[0] == Setting()
    assert saved == len(order) == len(set(order))


def test_an_epoch_goes_on_as_what_was_seen_of_it(small: Profile) -> None:
    subject = Subject(first_s=5.0)
    tried, _ = _tried(subject, replace(small, samples=40))
    found = {trial.setting: trial for trial in tried.found}
    assert found[Setting()].epoch_s == 5 + 10 * (4 + STEP_S)  # four batches were run, six follow
    subject = Subject(first_s=5.0)  # workers that outlive an epoch start once
    tried, _ = _tried(subject, replace(small, samples=40, persistent=True, workers=1))
    assert tried.found[0].epoch_s == 10 * (4 + STEP_S)


def test_what_was_predicted_is_shown_beside_what_was_measured(small: Profile) -> None:
    predicted = {row["setting"]: row["epoch_s"] for row in answer(small, draws=1)}
    trials = [Trial(Setting(), predicted[0]), Trial(Setting(workers=2), 2.0 * predicted[2])]
    trials.append(Trial(Setting(workers=4), why_not="ValueError: too many"))
    found = {row["setting"]: row for row in answer(small, trials, draws=1)}
    assert found[0]["verified"] == "run here, in its interval" and found[0]["deviation"] == 0.0
    assert found[2]["verified"] == "run here" and found[2]["deviation"] == pytest.approx(-0.5)
    assert found[4]["verified"] == "not tried: ValueError: too many" and "measured_s" not in found[4]
    assert found[8]["verified"] == "not tried: no time was left, or the script had ended"


def test_what_cannot_be_run_says_why_and_the_others_are_tried(small: Profile) -> None:
    def refuse(setting: Setting) -> None:
        if setting.loader == "torch":
            raise ValueError("torch's loader runs no pipeline")
        if setting.workers == 4:
            raise ValueError("num_workers is too many\nfor some reason")

    subject = Subject()
    subject.refuses = refuse
    tried, _ = _tried(subject, small)
    whys = {trial.setting: trial.why_not for trial in tried.found if trial.why_not}
    assert whys == {
        Setting(loader="torch"): "ValueError: torch's loader runs no pipeline",
        Setting(workers=4): "ValueError: num_workers is too many",
    }
    assert all(bool(trial.epoch_s) != bool(trial.why_not) for trial in tried.found)


def test_where_bytes_come_from_storage_only_what_was_seen_is_read() -> None:
    subject = Subject(keys=[*BATCHES, *BATCHES])
    tried, _ = _tried(subject, a_profile(samples=32, batch_size=4, workers=1))
    assert tried.found[0].epoch_s == 8 * (4 + STEP_S)
    assert subject.taken[0] == 4  # the others' files are not known, and may be in memory


def test_phases_share_out_all_of_the_time_and_no_more() -> None:
    box, now = TimeBox(100.0, 5.0), 5.0
    for name in SHARES:
        now += box.seconds_for(name, now)
    assert now == pytest.approx(105.0) and box.seconds_for("cold", 200.0) == 0.0
