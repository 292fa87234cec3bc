"""The demonstration's figures: a flat row for each epoch, and the whole document."""

from __future__ import annotations

from collections.abc import Mapping

from minato_gpu.lab import report
from minato_gpu.lab.demo.training import LANES, Tally, TrainingOutcome
from minato_gpu.samples import JSON


def document(outcome: TrainingOutcome, settings: Mapping[str, JSON]) -> dict[str, JSON]:
    """The JSON document of a run, with the totals over all epochs beside ``rows``, one row for each epoch.

    ``samples_delivered`` is counted by the training loop, ``samples_by_lane`` by the loader.
    """
    rows = [epoch_row(tally, stats) for tally, stats in zip(outcome.tallies, outcome.stats, strict=True)]
    delivered = sum(row["samples_delivered"] for row in rows)
    elapsed = sum(row["elapsed_s"] for row in rows)
    return report.document(
        settings,
        rows,
        samples_expected=sum(row["samples_expected"] for row in rows),
        samples_delivered=delivered,
        samples_by_lane={lane: sum(row[f"samples_{lane}_lane"] for row in rows) for lane in LANES},
        every_sample_once=outcome.complete,
        samples_per_s=delivered / elapsed if elapsed else None,
        first_batch_s=rows[0]["first_batch_s"] if rows else None,
        final_loss=rows[-1]["loss"] if rows else None,
        final_accuracy=rows[-1]["accuracy"] if rows else None,
        stalls=[stats["stalls"] for stats in outcome.stats],
        longest_waits=[stats["longest_waits"] for stats in outcome.stats],
    )


def epoch_row(tally: Tally, stats: Mapping[str, JSON]) -> dict[str, JSON]:
    """One epoch. Losses and accuracies are those of training, on augmented crops, as the model learns."""
    prediction = stats["prediction"]
    row = {
        "epoch": tally.epoch,
        "samples_expected": tally.samples_expected,
        "samples_delivered": tally.samples,
        "samples_failed": stats["samples_failed"],
        "samples_repeated": stats["samples_repeated"],
        "elapsed_s": tally.elapsed_s,
        "samples_per_s": tally.samples / tally.elapsed_s if tally.elapsed_s else None,
        "first_batch_s": stats["first_batch_s"],
        "loss": tally.loss,
        "accuracy": tally.accuracy,
        **{f"wait_{name}_s": stats["wait_s"][name] for name in ("p50", "p95", "p99", "total")},
        **{f"prediction_{name}": prediction[name] for name in ("samples", "log_sigma", "rank_correlation")},
        "peak_in_flight_bytes": stats["bytes_in_flight_peak"],
    }
    for lane in LANES:
        known = stats["lanes"].get(lane, {})
        row[f"samples_{lane}_lane"] = known.get("samples", 0)
        row[f"busy_share_{lane}_lane"] = known.get("busy_share")
        row[f"slots_{lane}_lane"] = known.get("slots")
    return row
