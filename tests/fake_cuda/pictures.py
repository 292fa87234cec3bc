"""torchvision's ``decode_jpeg`` for a CUDA device, by its decoder for the CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.fake_cuda.kernels import uploaded


def install(module: Any) -> None:
    """Replaces the function in the module ``torchvision.io.image``."""
    decode = module.decode_jpeg

    @functools.wraps(decode)
    def decode_jpeg(input: Any, mode: Any = module.ImageReadMode.UNCHANGED, device: Any = "cpu", **more: Any) -> Any:
        decoded = decode(input, mode, "cpu", **more)
        if torch.device(device).type == "cpu":
            return decoded
        return [uploaded(one) for one in decoded] if isinstance(decoded, list) else uploaded(decoded)

    module.decode_jpeg = decode_jpeg
