"""What the storage gives is measured while it is waited for."""

from __future__ import annotations

from minato_gpu.sources.rate import StorageRate


def test_only_stretches_count_in_which_too_little_was_there() -> None:
    rate = StorageRate()
    for at in range(100):
        rate.finished(0.01 * at, 1, behind=False)
    assert rate.bytes_per_s == 0.0
    for at in range(100, 200):
        rate.finished(0.01 * at, 1000, behind=True)
    assert 99_000 < rate.bytes_per_s < 101_000
    for at in range(200, 1000):
        rate.finished(0.01 * at, 1, behind=at % 5 > 0)  # never for long
    assert 99_000 < rate.bytes_per_s < 101_000


def test_a_slow_start_is_no_matter() -> None:
    rate, now = StorageRate(), 0.0
    for number in range(400):
        now += 0.1 if number < 100 else 0.01
        rate.finished(now, 1000, behind=True)
    assert 99_000 < rate.bytes_per_s < 101_000
