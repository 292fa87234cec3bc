"""A CUDA device's own clock, which says what samples cost there."""

from __future__ import annotations

import pytest
import torch

from minato_gpu.memory.accelerator import Accelerator

_CYCLES = 1 << 23


@pytest.mark.gpu
def test_a_part_lasts_from_the_end_of_the_one_before_whenever_it_was_issued() -> None:
    device = Accelerator(torch.device("cuda"))
    with device.running(device.stream()):
        torch.cuda._sleep(_CYCLES)  # the host is far ahead from here on
        marks = []
        for factor in (1, 4, 2):
            marks.append(device.event(timed=True))
            torch.cuda._sleep(factor * _CYCLES)
            marks.append(device.event(timed=True))
        marks[-1].synchronize()
        spans = zip(marks[::2], marks[1::2], strict=True)
        one, four, two = (device.seconds(begin, end) for begin, end in spans)
    assert 0 < one < two < four, "each for itself, although all were issued at once"
