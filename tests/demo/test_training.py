"""The consumer's own count of what it got."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minato_gpu.demo import display, summary
from minato_gpu.demo.training import Outcome, Tally

WAITS = {"p50": 0.001, "p95": 0.01, "p99": 0.02, "total": 0.5}


def _tally(epoch: int, labels: list[int]) -> Tally:
    tally = Tally(epoch, samples_expected=4, labels=torch.zeros(2, dtype=torch.int64), elapsed_s=2.0)
    for label in labels:
        # The model always says class 0.
        tally.add(torch.tensor([label]), torch.tensor([[1.0, 0.0]]), loss=float(label))
    return tally


def _stats(cpu: int, device: int) -> dict[str, Any]:
    lanes = {"cpu": {"samples": cpu, "slots": 2, "busy_share": 0.5}, "device": {"samples": device, "slots": 1}}
    return {
        "samples_failed": 0,
        "samples_repeated": 0,
        "first_batch_s": 0.25,
        "lanes": lanes,
        "prediction": {"samples": 4, "log_sigma": None, "rank_correlation": 0.5},
        "wait_s": WAITS,
        "stalls": {},
        "bytes_in_flight_peak": 1_000_000,
    }


def test_a_tally_counts_samples_hits_and_loss() -> None:
    tally = _tally(0, [0, 1, 1, 0])
    assert (tally.samples, tally.correct) == (4, 2)
    assert tally.loss == 0.5
    assert tally.accuracy == 0.5
    assert tally.labels.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("labels", "complete"),
    [([0, 0, 1, 1], True), ([0, 0, 1], False), ([0, 0, 1, 1, 1], False), ([0, 0, 0, 1], False)],
    ids=["all", "one lost", "one twice", "one for another"],
)
def test_an_outcome_is_complete_when_every_class_came_as_often_as_it_has_samples(
    labels: list[int], complete: bool
) -> None:
    outcome = Outcome(torch.tensor([2, 2]), [_tally(0, [1, 1, 0, 0]), _tally(1, labels)])
    assert outcome.complete is complete


def test_the_totals_of_the_document_are_sums_over_the_epochs() -> None:
    outcome = Outcome(torch.tensor([2, 2]), [_tally(0, [0, 0, 1, 1]), _tally(1, [0, 0, 1])])
    outcome.stats = [_stats(3, 1), _stats(2, 1)]
    document = summary.document(outcome, {"command": "demo"})
    assert document["samples_expected"] == 8
    assert document["samples_delivered"] == 7
    assert document["samples_by_lane"] == {"cpu": 5, "device": 2}
    assert document["samples_per_s"] == 7 / 4.0
    assert document["every_sample_once"] is False
    assert document["first_batch_s"] == 0.25
    assert document["final_loss"] == pytest.approx(1 / 3)
    assert [row["samples_delivered"] for row in document["rows"]] == [4, 3]


def test_the_live_line_and_the_table_fit_a_terminal() -> None:
    tally, stats = _tally(0, [0, 0, 1, 1]), _stats(3, 1)
    assert display.figures(tally, stats) == "     2 samples/s  cpu  75% device  25%  wait  25%"
    names, epoch = display.summary_columns([summary.epoch_row(tally, stats)])
    cells = dict(zip(names.cells, epoch.cells, strict=True))
    assert cells["consumer's wait, ms, p99"] == "20.0"
    assert cells["error of predicted costs (sigma of the log)"] == "-"
    assert cells["training accuracy"] == "50.0%"
