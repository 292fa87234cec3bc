"""Other settings that are really run: in which order, what becomes of those that cannot be, what an epoch came to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from minato_gpu.lab.analysis.phases import SHARES, TimeBox
from minato_gpu.lab.analysis.profile import CannotTry, Profile, Setting
from minato_gpu.lab.analysis.questions import compared, to_verify
from minato_gpu.lab.analysis.trials import Trials

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

    def in_setting(self, setting: Setting, batches: list[list[int]]) -> Any:
        self.refuses(setting)
        self.made.append(setting)
        subject = self

        class Loader:
            def __iter__(self) -> Iterator[list[int]]:
                subject.now += subject.first_s
                subject.taken.append(0)
                for batch in batches:
                    subject.now += len(batch)
                    subject.taken[-1] += 1
                    yield batch

        return Loader()


def _trials(subject: Subject, profile: Profile, seconds: float) -> tuple[Trials, list[int]]:
    findings: Any = SimpleNamespace(subject=subject, batches_seen=4, files=[])
    saved: list[int] = []
    found = Trials(findings, profile, seconds, lambda: saved.append(1), lambda: subject.now)
    return found, saved


def _run(subject: Subject, tried: Trials) -> None:
    def step_s() -> float:
        subject.now += STEP_S
        return STEP_S

    for _ in tried.batches(step_s):
        pass


@pytest.fixture
def small(profile: Profile) -> Profile:
    return replace(profile, samples=16, batch_size=4, workers=0, storage=None, persistent=False, cores=1)


def test_the_run_as_it_is_comes_first_and_batches_of_other_sizes_last(small: Profile) -> None:
    subject = Subject()
    tried, saved = _trials(subject, small, 1e6)
    _run(subject, tried)
    order = subject.made
    assert set(order) == {point.changes for point in to_verify(small)} and order[0] == Setting()
    sizes = [setting.batch_size for setting in order]
    assert sizes[-3:].count(None) == 0 and set(sizes[:-3]) == {None}
    assert len(saved) == len(order) == len(set(order))


def test_an_epoch_goes_on_as_what_was_seen_of_it(small: Profile) -> None:
    subject = Subject(first_s=5.0)
    tried, _ = _trials(subject, replace(small, samples=40), 1e6)
    _run(subject, tried)
    found = {trial.setting: trial for trial in tried.found}
    assert found[Setting()].epoch_s == 5 + 10 * (4 + STEP_S)  # four batches were run, six follow
    assert found[Setting(batch_size=8)].epoch_s == 5 + 5 * (8 + STEP_S)
    subject = Subject(first_s=5.0)  # workers that outlive an epoch start once
    tried, _ = _trials(subject, replace(small, samples=40, persistent=True, workers=1), 1e6)
    _run(subject, tried)
    assert tried.found[0].epoch_s == 10 * (4 + STEP_S)


def test_without_time_nothing_is_tried_and_that_is_said(small: Profile) -> None:
    subject = Subject()
    tried, _ = _trials(subject, small, 0.0)
    _run(subject, tried)
    assert not subject.made and not tried.found
    rows = [row for row in compared(small, tried.found, draws=1) if not row["verified"].startswith("not verifiable")]
    assert rows and {row["verified"] for row in rows} == {"not tried: no time was left for it"}


def test_what_cannot_be_run_says_why_and_the_others_are_tried(small: Profile) -> None:
    def refuse(setting: Setting) -> None:
        if setting.loader == "torch":
            raise CannotTry("torch's loader runs no pipeline")
        if setting.workers == 4:
            raise ValueError("num_workers is too many\nfor some reason")

    subject = Subject()
    subject.refuses = refuse
    tried, _ = _trials(subject, small, 1e6)
    _run(subject, tried)
    whys = {trial.setting: trial.why_not for trial in tried.found if trial.why_not}
    assert whys == {
        Setting(loader="torch"): "torch's loader runs no pipeline",
        Setting(workers=4): "ValueError: num_workers is too many",
    }
    assert all(bool(trial.epoch_s) != bool(trial.why_not) for trial in tried.found)


def test_where_bytes_come_from_storage_only_what_was_seen_is_read(profile: Profile) -> None:
    subject = Subject(keys=[*BATCHES, *BATCHES])
    tried, _ = _trials(subject, replace(profile, samples=32, batch_size=4, workers=1), 1e6)
    _run(subject, tried)
    assert tried.found[0].epoch_s == 8 * (4 + STEP_S)
    assert subject.taken[0] == 4  # the others' files are not known, and may be in memory


def test_phases_share_out_all_of_the_time_and_no_more() -> None:
    box, now = TimeBox(100.0, 5.0), 5.0
    for name in SHARES:
        now += box.seconds_for(name, now)
    assert now == pytest.approx(105.0) and box.seconds_for("cold", 200.0) == 0.0
