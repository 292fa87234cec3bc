"""The functions behind ``pipelines.photograph_stages``: each step on the CPU, and as a piece of a DALI graph.

Arrays are height x width x channel of uint8, red first, until ``normalise``. A box is (top, left, height, width)
in pixels of the upright picture.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

import numpy as np

from minato_gpu import read_bytes, shared_empty
from minato_gpu.device import nvjpeg
from minato_gpu.pipeline.stages import Fields, Params
from minato_gpu.util.messages import from_extra

from .decoding import as_repaired, cut_box, decode_repaired, decode_whole
from .headers import read_header

with from_extra("pipelines"):
    import cv2

SMALL = 3 << 14  # values of a picture of 128 x 128
ATTEMPTS = 10  # tries to place a box before the middle of the picture is taken, as in torchvision


def read(fields: Fields, params: Params) -> Fields:
    """Reads "path" (a name or a source): its bytes "encoded", (height, width) of the upright picture as "size", and
    "progressive": whether it is coded so. Raises ValueError for what ``read_header`` refuses."""
    encoded = read_bytes(fields["path"])
    data = encoded.tobytes()
    header = read_header(data)
    return {
        "encoded": as_repaired(encoded, data, header),
        "size": np.array([header.height, header.width], np.int32),
        "progressive": np.bool_(header.progressive),
    }


def draw_box(
    rng: np.random.Generator, meta: Fields, *, scale: tuple[float, float], ratio: tuple[float, float]
) -> Params:
    """A box of random area (share ``scale``) and shape (width / height, log-uniform in ``ratio``) within "size".

    The method of torchvision's ``RandomResizedCrop.get_params``: up to ten tries, then the largest box in the
    middle that has an allowed shape. (Szegedy et al., CVPR 2015, section 6, describe the sampling.)
    """
    height, width = (int(n) for n in meta["size"])
    for _ in range(ATTEMPTS):
        area = height * width * rng.uniform(*scale)
        shape = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(rng.integers(0, height - h + 1)), int(rng.integers(0, width - w + 1))
            return {"box": np.array([top, left, h, w], np.int32)}
    return {"box": _middle(height, width, ratio)}


def _middle(height: int, width: int, ratio: tuple[float, float]) -> Any:
    w = min(width, max(1, round(height * ratio[1])))
    h = min(height, max(1, round(width / ratio[0])))
    return np.array([(height - h) // 2, (width - w) // 2, h, w], np.int32)


def place_box(fields: Fields, params: Params) -> Fields:
    """The drawn box becomes a field, so that the decoder and the cost model can have it."""
    return {"box": params["box"]}


def whole_box(fields: Fields, params: Params) -> Fields:
    """The box that is the whole picture."""
    height, width = fields["size"]
    return {"box": np.array([0, 0, height, width], np.int32)}


def middle_box(fields: Fields, params: Params, *, share: float, ratio: float) -> Fields:
    """The largest box in the middle with this width / height, both sides then multiplied by ``share``."""
    height, width = map(int, fields["size"])
    h, w = (max(1, round(share * side)) for side in map(int, _middle(height, width, (ratio, ratio))[2:]))
    return {"box": np.array([(height - h) // 2, (width - w) // 2, h, w], np.int32)}


def cost_features(fields: Fields) -> tuple[float, ...]:
    """Returns what decides how long decoding takes: coded bytes, pixels of the picture and of the box, the bytes before
    the box's last row (a baseline JPEG need be decoded no further), and the bytes if coded progressively. (For a
    photograph on its side the last row is not quite the upright one's; the cost model lives with that.)"""
    size, box, encoded = fields["size"], fields["box"], float(fields["encoded"].size)
    height, width = float(size[0]), float(size[1])
    to_end = encoded * float(box[0] + box[2]) / height
    progressive = encoded if fields["progressive"] else 0.0
    return encoded, height * width, float(box[2]) * float(box[3]), to_end, progressive


def decode(fields: Fields, params: Params, *, fancy: bool = True) -> Fields:
    """The box of the decoded picture: upright, RGB also where the file is greyscale. ``fancy``: see ``decode_box``."""
    top, left, height, width = (int(n) for n in fields["box"])
    return {"image": decode_repaired(fields["encoded"], (top, left, height, width), fancy)}


def decode_picture(fields: Fields, *, fancy: bool = True) -> Fields:
    """Makes "picture", of which any box can be cut: the whole picture, or its bytes (see ``decode_whole``)."""
    return {"picture": decode_whole(fields["encoded"], fancy)}


def crop_picture(fields: Fields, params: Params, *, fancy: bool = True) -> Fields:
    """Cuts the box out of "picture", which ``decode_picture`` made: the same pixels as ``decode``."""
    top, left, height, width = (int(n) for n in fields["box"])
    return {"image": cut_box(fields["picture"], (top, left, height, width), fancy)}


def decode_dali(dali: ModuleType, fields: Fields, params: Params, device: str, *, fancy: bool = True) -> Fields:
    """As ``decode``, but only the box is decoded. On a GPU by nvJPEG, nearly all by the engine made for it where there
    is one: what is left to the others takes cores, and those are the CPU lane's. nvJPEG knows JPEG alone: the operator
    itself decodes PNG and WebP on the host, with the CPU lane's libraries, and copies the picture to the GPU. DALI's
    decoder on the CPU upsamples smoothly whatever is asked for.

    Where the GPU decodes no boxes (``nvjpeg.decodes_regions``) it decodes the whole picture, and cuts the box."""
    encoded, box = fields["encoded"], fields["box"]
    begin, extent = box[0:2], box[2:4]
    options: dict[str, Any] = {"output_type": dali.types.RGB, "device": "cpu"}
    if device == "gpu":
        options |= {"device": "mixed", "jpeg_fancy_upsampling": fancy, "hw_decoder_load": nvjpeg.engine_load()}
        if not nvjpeg.decodes_regions():
            return {"image": dali.fn.slice(dali.fn.decoders.image(encoded, **options), begin, extent, axes=[0, 1])}
    return {"image": dali.fn.decoders.image_slice(encoded, begin, extent, axes=[0, 1], **options)}


def resize(fields: Fields, params: Params, *, size: tuple[int, int] | None = None) -> Fields:
    """Scales to ``size`` (height, width), or to "shape" if None: bilinear between the four nearest pixels, not
    antialiased."""
    height, width = size or map(int, fields["shape"])
    return {"image": cv2.resize(fields["image"], (width, height), interpolation=cv2.INTER_LINEAR)}


def resize_dali(
    dali: ModuleType, fields: Fields, params: Params, device: str, *, size: tuple[int, int] | None = None
) -> Fields:
    """As ``resize``. DALI antialiases unless told not to, which OpenCV's bilinear does not do."""
    shape = list(size) if size else dali.fn.cast(fields["shape"], dtype=dali.types.FLOAT)
    image = dali.fn.resize(fields["image"], size=shape, interp_type=dali.types.INTERP_LINEAR, antialias=False)
    return {"image": image}


def draw_mirror(rng: np.random.Generator, meta: Fields, *, probability: float) -> Params:
    """Draws "mirror": 1 with the given probability, else 0."""
    return {"mirror": int(rng.random() < probability)}


def mirror(fields: Fields, params: Params, *, drawn: bool = True) -> Fields:
    """Exchanges left and right where "mirror" is not 0: a parameter if it is ``drawn`` by this stage, else a field."""
    image, turned = fields["image"], (params if drawn else fields)["mirror"]
    return {"image": cv2.flip(image, 1) if turned else image}


def mirror_dali(dali: ModuleType, fields: Fields, params: Params, device: str, *, drawn: bool = True) -> Fields:
    """As ``mirror``."""
    return {"image": dali.fn.flip(fields["image"], horizontal=(params if drawn else fields)["mirror"])}


@functools.cache
def _normalisation(mean: tuple[float, float, float], std: tuple[float, float, float]) -> Any:
    """(value - 255 * mean) * (1 / (255 * std)), as OpenCV takes it."""
    return cv2.dnn.Image2BlobParams([1 / (255 * s) for s in std], mean=[255 * m for m in mean])


def normalise(
    fields: Fields, params: Params, *, mean: tuple[float, float, float], std: tuple[float, float, float]
) -> Fields:
    """Converts to float32 (3, height, width): (value / 255 - mean) / std, channel by channel."""
    image = fields["image"]
    if image.size <= SMALL:  # one call of OpenCV's costs less, which larger pictures would be copied from
        return {"image": cv2.dnn.blobFromImageWithParams(image, _normalisation(tuple(mean), tuple(std)))[0]}
    planes = shared_empty((3, *image.shape[:2])).numpy()
    for channel, values in enumerate(cv2.split(image)):
        np.subtract(values, np.float32(255 * mean[channel]), out=planes[channel], dtype=np.float32)
        planes[channel] *= np.float32(1 / (255 * std[channel]))
    return {"image": planes}


def normalise_dali(
    dali: ModuleType,
    fields: Fields,
    params: Params,
    device: str,
    *,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
) -> Fields:
    """As ``normalise``."""
    image = dali.fn.crop_mirror_normalize(
        fields["image"],
        dtype=dali.types.FLOAT,
        output_layout="CHW",
        mean=[255 * m for m in mean],
        std=[255 * s for s in std],
    )
    return {"image": image}
