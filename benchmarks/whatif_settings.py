"""The settings that ``benchmarks.whatif`` asks about: each as it is run, and as it is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.whatif_profile import LATENCY_MS, Beyond
from benchmarks.whatif_run import WARM, Way
from minato_gpu.lab.analysis.profile import Profile, Setting

QUESTIONS = ("cache", "workers", "step", "latency")
POLICIES = ("minio", "next-use", "lru")
_FILLING = 5  # of two shards: the epochs that are predicted, whose orders are known, are those after them


@dataclass(frozen=True)
class Point:
    """A setting: as it is run, and as it is asked for."""

    question: str
    name: str
    way: Way
    setting: Setting


class Around(NamedTuple):
    """What settings are chosen around: a batch, seconds and bytes of a mean sample."""

    batch: int
    prepare_s: float
    nbytes: float
    base: Way
    quick: bool


def points(question: str, around: Around) -> Iterator[Point]:
    """The settings of a question."""
    base, quick = around.base, around.quick
    if question == "cache":
        yield from _caches(around)
    elif question == "workers":
        for workers in (1, 2) if quick or not base.slept else (1, 2, 4, 8, 16):
            way = replace(base, workers=workers, cache=WARM, epochs=max(base.epochs, workers // 2))
            yield Point(question, f"{workers} workers", way, Setting(workers=workers, cache=WARM))
    elif question == "step":
        balance = around.batch * around.prepare_s / base.workers
        for part in (1.0,) if quick else (0.25, 0.5, 0.8, 1.0, 1.25, 2.0):
            way = replace(base, cache=WARM, step_s=part * balance)
            yield Point(question, f"{part:g} of balance", way, Setting(cache=WARM, step_s=part * balance))
    else:
        rate = _rate(around, 1.5)  # at once, the server would take the cores that it has in common with the loader
        for latency in (20.0,) if quick else (0.0, 5.0, 20.0, 50.0, 100.0):
            way = replace(base, shards=2, rate=rate, latency_ms=latency, filling=_FILLING, epochs=4)
            yield Point(question, f"{latency:g} ms", way, Setting(latency_s=latency / 1e3, bytes_per_s=rate))


def _caches(around: Around) -> Iterator[Point]:
    """Storage that gives three fifths of what workers could prepare."""
    rate = _rate(around, 0.6)
    shared = replace(around.base, shards=2, rate=rate, latency_ms=LATENCY_MS, filling=_FILLING, epochs=4)
    yield Point("cache", "no cache", shared, Setting(bytes_per_s=rate))
    for policy in POLICIES:
        for share in (0.5,) if around.quick else (0.25, 0.5, 0.75, 1.0):
            way = replace(shared, cache=share, policy=policy)
            yield Point("cache", f"{policy} {share:g}", way, Setting(cache=share, policy=policy, bytes_per_s=rate))


def _rate(around: Around, times: float) -> float:
    """Bytes a second: so many times what workers could prepare."""
    return times * around.base.workers / around.prepare_s * around.nbytes


def asked(profile: Profile, beyond: Beyond, point: Point) -> tuple[Profile, Setting]:
    """The profile as this setting reads the data, and the setting with what a request and a sleep take beyond their
    nominal time."""
    way, setting = point.way, point.setting
    storage = profile.storage
    assert storage is not None
    own = profile
    if way.shards > 1:
        samples = -(-profile.samples // way.shards)
        own = replace(own, samples=samples, shards=way.shards, overlap=False, between_s=beyond.between_s)
    nominal = LATENCY_MS / 1e3
    if setting.latency_s is not None:
        setting = replace(setting, latency_s=max(0.0, storage.latency_s - nominal) + setting.latency_s)
    if setting.step_s:
        setting = replace(setting, step_s=setting.step_s + beyond.sleep_s)
    return own, setting
