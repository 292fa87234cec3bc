"""Standard stages of photographs, to build a pipeline from: read, crop, decode, resize, flip, normalise.

    stages = (READ, random_resized_crop(), decode(), resize(224), flip(224), normalise(224))
    Pipeline(stages, outputs=("image", "label"))

The data set returns "path" (and whatever is passed on, as "label" here). A crop (``random_resized_crop``,
``centre_crop``, ``WHOLE``) comes before ``decode``, which decodes no more of the file. All but ``READ`` and the crop
also run on the device lane. Stages of one's own go between them: "image" is uint8 (h, w, 3), red first, until
``normalise``.

Limits are in grey levels. On the CPU both lanes decode with libjpeg-turbo; where ``pipelines.decoding`` must do with
OpenCV, CMYK and 16-bit files are rounded in different places. nvJPEG transforms with other arithmetic: on an H200 it
was off by 3.1 at most, and by 0.3 on the average of a photograph. Its limits are two and a half times as much. They do
not let another way of decoding pass: libjpeg-turbo without smooth upsampling of chroma is off by up to 67 on such
photographs, with its fast transform by up to 18, and by 1.0 on the average.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from minato_gpu.pipeline.pipeline import DaliFragment, Field, Keepable, Stage, Tolerance
from minato_gpu.pipeline.stages import CpuFunction, Draw

from . import decoding, image_stages

Size = int | tuple[int, int]  # pixels: the side of a square, or (height, width)

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
"""Reads "path": writes its bytes "encoded", uint8 (n,), the upright picture's "size", int32 (2,), and "progressive"."""


def _crop_box(cpu: CpuFunction, draw: Draw | None = None) -> Stage:
    return Stage(
        "crop_box",
        reads=() if draw else ("size",),
        writes={"box": Field(np.int32, (4,))},
        cpu=cpu,
        draw=draw,
        meta=("size",) if draw else (),
        features=image_stages.cost_features,
        feature_names=("encoded_bytes", "pixels", "crop_pixels", "bytes_to_crop_end", "progressive_bytes"),
    )


WHOLE = _crop_box(image_stages.whole_box)
"""Writes "box", the whole picture: int32 (4,), top, left, height, width."""


def centre_crop(share: float = 224 / 256, ratio: float = 1.0) -> Stage:
    """Places a box in the middle, for evaluation.

    With its defaults the box is what torchvision's ``Resize(256)`` and ``CenterCrop(224)`` leave of a picture, but for
    rounding; ``resize(224)`` brings it to that size.

    Args:
        share: of the largest box of this shape, how much is kept of each side.
        ratio: width / height of the box.

    Returns:
        A stage that writes "box": int32 (4,), top, left, height, width. On the host alone.

    Raises:
        ValueError: ``share`` is not in (0, 1], or ``ratio`` not above 0.
    """
    if not (0 < share <= 1 and ratio > 0):
        raise ValueError(f"share must be in (0, 1] and ratio > 0, got {share} and {ratio}")
    return _crop_box(partial(image_stages.middle_box, share=share, ratio=ratio))


def random_resized_crop(scale: tuple[float, float] = (0.08, 1.0), ratio: tuple[float, float] = (3 / 4, 4 / 3)) -> Stage:
    """Draws a box as torchvision's ``RandomResizedCrop`` does; ``resize`` brings it to its size.

    Args:
        scale: range of the box's share of the picture's area.
        ratio: range of its width / height.

    Returns:
        A stage that writes "box": int32 (4,), top, left, height, width. On the host alone.

    Raises:
        ValueError: a range that makes no sense.
    """
    if not 0 < scale[0] <= scale[1] <= 1:
        raise ValueError(f"scale must be a range of shares, 0 < low <= high <= 1, got {scale}")
    if not 0 < ratio[0] <= ratio[1]:
        raise ValueError(f"ratio must be a range, 0 < low <= high, got {ratio}")
    return _crop_box(image_stages.place_box, partial(image_stages.draw_box, scale=scale, ratio=ratio))


def whole_tolerance(fancy_upsampling: bool) -> dict[str, Tolerance]:
    """Returns how far a whole pipeline's device implementations may be from the CPU's, by kind of device."""
    return {"cpu": GEOMETRIC if fancy_upsampling else _OTHER_UPSAMPLING, "cuda": NVJPEG}


def decode(fancy_upsampling: bool = True) -> Stage:
    """Decodes the box of a JPEG, PNG or WebP file: upright, RGB. A cache may keep the whole picture ("picture").

    Args:
        fancy_upsampling: chroma of a JPEG is upsampled smoothly, as by Pillow and OpenCV, or (False) repeated, as by
            DALI: nvJPEG's engine then decodes twice as many a second for a third of the host's work.

    Returns:
        A stage that writes "image": uint8 (h, w, 3).

    Raises:
        ImportError: False needs a library that is not installed.
    """
    decoding.check_upsampling(fancy_upsampling)
    if torch.cuda.is_initialized():  # forked workers cannot look for GPUs any more, and importing takes nothing more
        decoding.library()
    return Stage(
        "decode",
        reads=("encoded", "box"),
        writes={"image": _picture(None)},
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


def resize(size: Size) -> Stage:
    """Scales the picture: bilinear between the four nearest pixels, without antialiasing.

    Args:
        size: side of a square, or (height, width), in pixels.

    Returns:
        A stage that writes "image": uint8 (h, w, 3).

    Raises:
        ValueError: ``size`` is below 1.
    """
    sides = _sides(size)
    return Stage(
        "resize",
        reads=("image",),
        writes={"image": _picture(size)},
        cpu=partial(image_stages.resize, size=sides),
        device=DaliFragment(partial(image_stages.resize_dali, size=sides)),
        tolerance={"cpu": GEOMETRIC, "cuda": GEOMETRIC},
    )


def flip(size: Size | None, probability: float = 0.5) -> Stage:
    """Exchanges left and right of some pictures.

    Args:
        size: of the picture, as in ``resize``; None where it varies.
        probability: of a picture to be mirrored.

    Returns:
        A stage that writes "image": uint8 (h, w, 3).

    Raises:
        ValueError: ``size`` is below 1, or ``probability`` not in [0, 1].
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"flip needs a probability, got {probability}")
    return Stage(
        "flip",
        reads=("image",),
        writes={"image": _picture(size)},
        cpu=image_stages.mirror,
        device=DaliFragment(image_stages.mirror_dali),
        draw=partial(image_stages.draw_mirror, probability=probability),
    )


def normalise(
    size: Size | None, mean: tuple[float, float, float] = MEAN, std: tuple[float, float, float] = STD
) -> Stage:
    """Brings pixels to (value / 255 - ``mean``) / ``std``, channel first.

    Args:
        size: of the picture, as in ``resize``; None where it varies (batches then need a ``collate_fn``).
        mean: of red, green and blue, in the range 0 to 1.
        std: their standard deviations.

    Returns:
        A stage that writes "image": float32 (3, h, w).

    Raises:
        ValueError: ``size`` is below 1, or a deviation not above 0.
    """
    if min(std) <= 0:
        raise ValueError(f"std must be > 0, got {std}")
    # The smallest level of the three channels, so that limits are never wider than declared.
    normal = Field(np.float32, (3, *_varying(size)), layout="CHW", level=1 / (255 * max(std)))
    return Stage(
        "normalise",
        reads=("image",),
        writes={"image": normal},
        cpu=partial(image_stages.normalise, mean=mean, std=std),
        device=DaliFragment(partial(image_stages.normalise_dali, mean=mean, std=std)),
        tolerance={"cpu": _ROUNDING, "cuda": _ROUNDING},
    )


def _picture(size: Size | None) -> Field:
    return Field(np.uint8, (*_varying(size), 3), layout="HWC")


def _varying(size: Size | None) -> tuple[int | None, int | None]:
    return (None, None) if size is None else _sides(size)


def _sides(size: Size) -> tuple[int, int]:
    height, width = size if isinstance(size, Sequence) else (size, size)
    if min(height, width) < 1:
        raise ValueError(f"size must be at least 1 pixel, got {size}")
    return height, width
