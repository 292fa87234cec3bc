"""The manual's recipes for other libraries run, and their samples depend on their seeds alone; skipped without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu import DataLoader, Pipeline
from tests.support import pages

PAGE = "minato_gpu/manual/other_libraries.md"


class Pictures:
    """Forty pictures, all alike."""

    def __init__(self, image: Any) -> None:
        self.fields = image

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return self.fields


def _ramp(*shape: int) -> Any:
    return np.arange(np.prod(shape)).reshape(shape)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("heading", "module", "fields"),
    [
        ("albumentations", "albumentations", {"image": _ramp(40, 50, 3).astype(np.uint8)}),
        ("kornia", "kornia", {"image": _ramp(3, 64, 64).astype(np.float32) / 12288}),
        ("MONAI", "monai", {"image": _ramp(1, 20, 20, 20).astype(np.float32), "label": np.ones((1, 20, 20, 20), "u1")}),
    ],
)
def test_recipe(heading: str, module: str, fields: Any, tmp_path: Path) -> None:
    pytest.importorskip(module)
    names: dict[str, Any] = {"dataset": Pictures(fields)}
    torch.manual_seed(3)
    (example,) = pages.examples(PAGE, heading)
    pages.run(example, names, tmp_path)
    assert names["loader"].stats()["samples_delivered"] == 40
    pipeline: Pipeline = names["loader"].pipeline
    lanes: list[Any] = [["cpu"], ["device"]] if pipeline.stages[0].device else [["cpu"], ["cpu"]]
    made = []
    for workers, which in enumerate(lanes, start=1):
        torch.manual_seed(3)
        loader: Any = DataLoader(names["dataset"], 40, num_workers=workers, pipeline=pipeline, lanes=which)
        made += [batch["image"] for batch in loader]
    assert len({each.numpy().tobytes() for each in made[0]}) > 20  # samples differ from each other
    torch.testing.assert_close(made[0], made[1], atol=1e-4, rtol=0)  # and are the same with other workers, and lanes
