"""What is understood of DALI's errors, in the words that DALI 2.4 uses."""

from __future__ import annotations

import pytest

from minato_gpu.lanes.dali_errors import leaves_graph_usable, sample_of


def words(operator: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"Critical error in pipeline:\nError in MIXED operator `{operator}`,\n"
        "which was used in the pipeline definition with the following traceback:\n\n"
        f'  File "{__file__}", line 15, in decode\n    image = dali.fn.{operator}(\n\nencountered:\n\n{what}\n'
        "Current pipeline object is no longer valid."
    )


@pytest.mark.parametrize(
    ("error", "sample", "usable"),
    [
        (words("nvidia.dali.fn.decoders.image", "Failed to decode sample #37 : "), 37, True),
        (words("nvidia.dali.fn.decoders.image", "nvImageCodec failure: '#4'"), None, True),
        (words("nvidia.dali.fn.slice", "[1000..1005] is not valid for image dimensions [74 x 80]"), None, True),
        (words("nvidia.dali.fn.external_source", "Inconsistent batch size"), None, False),
        (RuntimeError("an illegal memory access was encountered"), None, False),
        (ValueError("Failed to decode sample #3"), None, False),
    ],
)
def test_what_failed(error: Exception, sample: int | None, usable: bool) -> None:
    assert (sample_of(error), leaves_graph_usable(error)) == (sample, usable)
