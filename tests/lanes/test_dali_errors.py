"""What is understood of DALI's errors, in the words that DALI 2.4 uses."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from minato_gpu.lanes.dali_errors import leaves_graph_usable, sample_of, stage_of


def decode(dali: Any, fields: Any, params: Any, device: str) -> Any:
    """A fragment."""


def resize(dali: Any, fields: Any, params: Any, device: str, *, size: int) -> Any:
    """Another one."""


def words(operator: str, what: str, place: str = "decode", file: str = __file__) -> RuntimeError:
    return RuntimeError(
        f"Critical error in pipeline:\nError in MIXED operator `{operator}`,\n"
        "which was used in the pipeline definition with the following traceback:\n\n"
        f'  File "{file}", line 15, in {place}\n    image = dali.fn.{operator}(\n\nencountered:\n\n{what}\n'
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


def test_the_stage_whose_function_made_the_operator() -> None:
    builders: dict[int, Any] = {2: decode, 3: functools.partial(functools.partial(resize), size=7), 4: max}
    assert stage_of(words("fn.decoders.image", "", "decode"), builders) == 2
    assert stage_of(words("fn.resize", "", "resize"), builders) == 3
    assert stage_of(words("fn.flip", "", "mirror"), builders) is None
    assert stage_of(words("fn.resize", "", "resize", "/elsewhere.py"), builders) is None
    assert stage_of(words("fn.decoders.image", ""), {1: decode, 2: decode}) is None, "either may be meant"
    assert stage_of(RuntimeError("no place"), builders) is None
