"""The stages that all pipelines of photographs share, whole: how to read, decode and normalise, and how exactly.

Limits are in grey levels. On the CPU both lanes decode with libjpeg-turbo; where ``pipelines.decoding`` must do with
OpenCV, CMYK and 16-bit files are rounded in different places. nvJPEG transforms with other arithmetic: on an H200 it
was off by 3.1 at most, and by 0.3 on the average of a photograph. Its limits are two and a half times as much. They do
not let another way of decoding pass: libjpeg-turbo without smooth upsampling of chroma is off by up to 67 on such
photographs, with its fast transform by up to 18, and by 1.0 on the average.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from minato_gpu.pipeline import DaliFragment, Field, Keepable, Stage, Tolerance

from . import decoding, image_stages

MEAN = (0.485, 0.456, 0.406)  # of ImageNet's training photographs, channels red, green, blue, range 0 to 1
STD = (0.229, 0.224, 0.225)

GEOMETRIC = Tolerance(2, 0.25)
NVJPEG = Tolerance(8, 0.75)
_ROUNDING = Tolerance(0.001, 0.001)
_OTHER_UPSAMPLING = Tolerance(128, 2)  # of DALI's CPU decoder, a stand-in that only upsamples smoothly

READ = Stage(
    "read",
    reads=("path",),
    writes={"encoded": Field(np.uint8, (None,)), "size": Field(np.int32, (2,)), "progressive": Field(np.bool_)},
    cpu=image_stages.read,
)


def whole_tolerance(fancy_upsampling: bool) -> dict[str, Tolerance]:
    """How far a whole pipeline's device implementations may be from the CPU's, by kind of device."""
    return {"cpu": GEOMETRIC if fancy_upsampling else _OTHER_UPSAMPLING, "cuda": NVJPEG}


def decode(fancy_upsampling: bool = True) -> Stage:
    """image: uint8 (h, w, 3), the box of the photograph, of which a cache may keep all ("picture").

    ``fancy_upsampling``: see ``decoding.decode_box``; without it nvJPEG's engine decodes twice as many photographs a
    second for a third of the host's work. Raises ImportError where that needs a library that is not installed.
    """
    decoding.check_upsampling(fancy_upsampling)
    if torch.cuda.is_initialized():  # forked workers cannot look for GPUs any more, and importing takes nothing more
        decoding.library()
    return Stage(
        "decode",
        reads=("encoded", "box"),
        writes={"image": Field(np.uint8, (None, None, 3), layout="HWC")},
        cpu=partial(image_stages.decode, fancy=fancy_upsampling),
        device=DaliFragment(partial(image_stages.decode_dali, fancy=fancy_upsampling), host_reads=("encoded", "box")),
        tolerance={"cpu": Tolerance(1, 0.25) if fancy_upsampling else _OTHER_UPSAMPLING, "cuda": NVJPEG},
        keep=Keepable(
            reads=("encoded",),
            writes={"picture": Field(object)},  # uint8 (h, w, 3), or the bytes, uint8 (n,)
            make=partial(image_stages.decode_picture, fancy=fancy_upsampling),
            cpu=partial(image_stages.crop_picture, fancy=fancy_upsampling),
        ),
    )


def normalise(size: int | None, mean: tuple[float, float, float], std: tuple[float, float, float]) -> Stage:
    """image: uint8 (h, w, 3) to float32 (3, h, w), where both are ``size``, or vary (None)."""
    # The smallest level of the three channels, so that limits are never wider than declared.
    normal = Field(np.float32, (3, size, size), layout="CHW", level=1 / (255 * max(std)))
    return Stage(
        "normalise",
        reads=("image",),
        writes={"image": normal},
        cpu=partial(image_stages.normalise, mean=mean, std=std),
        device=DaliFragment(partial(image_stages.normalise_dali, mean=mean, std=std)),
        tolerance={"cpu": _ROUNDING, "cuda": _ROUNDING},
    )
