"""The picture shows what the timeline says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from minato_gpu.demo import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Ten seconds: cpu slot 0 works for six of them, once on a slow sample; the device for half; the consumer waits 1 + 2.
TIMELINE: dict[str, Any] = {
    "spans": [
        (0.0, 2.0, "cpu", 0, 0, 0, 8, False),
        (2.0, 5.0, "cpu", 0, 0, 8, 1, True),
        (9.0, 10.0, "cpu", 0, 1, 0, 8, False),
        (5.0, 10.0, "device", 0, 0, 9, 16, False),
    ],
    "batches": [(1.0, 0, 0, 16, 1.0), (10.0, 0, 1, 9, 2.0)],
}


def _texts(axis: Axes) -> list[str]:
    return [text.get_text().strip() for text in axis.texts]


def _bars(axis: Axes, colour: str) -> list[tuple[float, float]]:
    """(start, end) in seconds of all bars of one colour."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_hex

    found = []
    for collection in axis.collections:
        if isinstance(collection, PolyCollection) and to_hex(np.asarray(collection.get_facecolor())[0]) == colour:
            corners = [np.asarray(path.vertices) for path in collection.get_paths()]
            found += [(float(xy[:, 0].min()), float(xy[:, 0].max())) for xy in corners]
    return found


@pytest.fixture
def axis() -> Axes:
    return picture.figure([TIMELINE], "title").axes[0]


def test_a_row_for_every_slot_and_the_consumer_with_its_share(axis: Axes) -> None:
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ["cpu slot 0", "device slot 0", "consumer"]
    assert _texts(axis) == ["60% busy", "50% busy", "30% waiting"]
    assert axis.get_title(loc="left") == "epoch 1 of 1: 25 samples in 10.0 s"


def test_slow_samples_have_their_own_colour_and_a_mark(axis: Axes) -> None:
    assert _bars(axis, "#e8820c") == [(2.0, 5.0)]
    marks = [np.asarray(line.get_xdata()).tolist() for line in axis.lines]
    assert marks == [[3.5], []]


def test_work_for_another_epoch_is_paler(axis: Axes) -> None:
    assert _bars(axis, "#a9c1dc") == [(9.0, 10.0)]
    assert _bars(axis, "#4c78a8") == [(0.0, 2.0)]


def test_the_consumer_waits_until_each_hand_over_and_works_in_between(axis: Axes) -> None:
    assert _bars(axis, "#c8374a") == [(0.0, 1.0), (8.0, 10.0)]
    assert (1.0, 8.0) in _bars(axis, "#d9d9d9")


def test_overlapping_spans_count_once() -> None:
    overlapping = [(0.0, 6.0, "cpu", 0, 0, 0, 1, False), (2.0, 4.0, "cpu", 0, 0, 1, 1, False)]
    axis = picture.figure([{"spans": overlapping, "batches": [(10.0, 0, 0, 2, 0.0)]}], "title").axes[0]
    assert _texts(axis)[0] == "60% busy"


def test_an_empty_timeline_and_several_epochs_make_a_png(tmp_path: Path) -> None:
    picture.draw([TIMELINE, {"spans": [], "batches": []}], tmp_path / "timeline.png", "title")
    data = (tmp_path / "timeline.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(data) > 10_000
