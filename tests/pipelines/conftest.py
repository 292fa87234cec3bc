"""What tests of several pipelines share."""

from __future__ import annotations

import pytest

from pipelines import decoding


@pytest.fixture(params=["nvimagecodec", "opencv"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Photographs are decoded by this library."""
    if request.param == "opencv":
        monkeypatch.setattr(decoding, "library", lambda: None)
    else:
        pytest.importorskip("nvidia.nvimgcodec")
    return str(request.param)
