"""Other settings that are really run: in which order, what becomes of those that cannot be, what an epoch came to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from minato_gpu.lab.analysis import trials
from minato_gpu.lab.analysis.phases import SHARES, TimeBox
from minato_gpu.lab.analysis.profile import CannotTry, Phase, Profile, Setting
from minato_gpu.lab.analysis.questions import to_verify
from minato_gpu.lab.analysis.trials import NO_TIME, Trials
from minato_gpu.sources.source import Source

BATCHES = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
STEP_S = 2.0


class Subject:
    """Its loaders take a second for each sample; ``first_s`` more for the first batch."""

    def __init__(self, keys: Sequence[list[int]] = BATCHES, first_s: float = 0.0) -> None:
        self.keys, self.first_s, self.batch_size = keys, first_s, 4
        self.loader = SimpleNamespace(dataset=SimpleNamespace())
        self.now = 0.0
        self.made: list[tuple[Setting, list[list[int]], int | None]] = []
        self.taken: list[int] = []
        self.refuses: Callable[[Setting], None] = lambda setting: None

    def in_setting(self, setting: Setting, batches: list[list[int]], cache: int | None) -> Any:
        self.refuses(setting)
        self.made.append((setting, list(batches), cache))
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


def with_files(subject: Subject) -> None:
    """Its data set says where samples' bytes are."""
    subject.loader.dataset.source = lambda key: Source(f"/nowhere/{key}")


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
    order = list(dict.fromkeys(setting for setting, _, _ in subject.made))
    assert set(order) == {point.changes for point in to_verify(small)} and order[0] == Setting()
    sizes = [setting.batch_size for setting in order]
    assert sizes[-3:].count(None) == 0 and set(sizes[:-3]) == {None}
    assert len(saved) == len(subject.made) > len(order)  # again and again, while there is time
    assert {len(trial.epoch_s) for trial in tried.found} == {trials._ROUNDS}


def test_an_epoch_goes_on_as_what_was_seen_of_it(small: Profile) -> None:
    subject = Subject(first_s=5.0)
    tried, _ = _trials(subject, replace(small, samples=40), 1e6)
    _run(subject, tried)
    found = {trial.setting: trial for trial in tried.found}
    assert found[Setting()].epoch_s[0] == 5 + 10 * (4 + STEP_S)  # four batches were run, six follow
    assert found[Setting(batch_size=8)].epoch_s[0] == 5 + 5 * (8 + STEP_S)
    subject = Subject(first_s=5.0)  # workers that outlive an epoch start once
    tried, _ = _trials(subject, replace(small, samples=40, persistent=True, workers=1), 1e6)
    _run(subject, tried)
    assert tried.found[0].epoch_s[0] == 10 * (4 + STEP_S)


def test_without_time_nothing_is_tried_and_that_is_said(small: Profile) -> None:
    subject = Subject()
    tried, _ = _trials(subject, small, 0.0)
    _run(subject, tried)
    assert not subject.made and {trial.why_not for trial in tried.found} == {NO_TIME}


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


def test_a_cache_is_filled_first(profile: Profile) -> None:
    subject = Subject()
    with_files(subject)
    measured = replace(profile, samples=16, batch_size=4, workers=1, phases={"cold": Phase(4, 24.0, 16.0)})
    tried, _ = _trials(subject, measured, 1e6)
    _run(subject, tried)
    assert measured.storage is not None
    caches = {setting.cache: cache for setting, _, cache in subject.made}
    assert caches[0.25] == 4 * measured.storage.nbytes and caches[None] is None
    found = {trial.setting.cache: trial for trial in tried.found}
    assert found[0.25].epoch_s[0] == 4 * (4 + STEP_S)
    subject = Subject()
    with_files(subject)
    tried, _ = _trials(subject, replace(measured, phases={"cold": Phase(4, 1e6, 0.0)}), 1e6)  # two epochs take longer
    _run(subject, tried)
    assert {trial.why_not for trial in tried.found if trial.setting.cache} == {NO_TIME}


def test_without_declared_sources_there_is_nothing_to_keep_and_storage_is_tried_as_far_as_it_was_seen(
    profile: Profile,
) -> None:
    subject = Subject(keys=[*BATCHES, *BATCHES])
    tried, _ = _trials(subject, replace(profile, samples=32, batch_size=4, workers=1), 1e6)
    _run(subject, tried)
    caches = [trial for trial in tried.found if trial.setting.cache]
    assert caches and all("declares no sources" in trial.why_not and not trial.epoch_s for trial in caches)
    assert tried.found[0].epoch_s[0] == 8 * (4 + STEP_S)
    assert subject.taken[0] == 4  # the others' files are not known, and may be in memory


def test_fewer_cores_are_given_back(small: Profile) -> None:
    before, seen = os.sched_getaffinity(0), []
    subject = Subject()

    def look(setting: Setting) -> None:
        seen.append((setting.cores, len(os.sched_getaffinity(0))))

    subject.refuses = look
    tried, _ = _trials(subject, replace(small, cores=2), 1e6)
    _run(subject, tried)
    assert (1, 1) in seen and (None, len(before)) in seen and os.sched_getaffinity(0) == before


def test_phases_share_out_all_of_the_time_and_no_more() -> None:
    box, now = TimeBox(100.0, 5.0), 5.0
    for name in SHARES:
        now += box.seconds_for(name, now)
    assert now == pytest.approx(105.0) and box.seconds_for("cold", 200.0) == 0.0
