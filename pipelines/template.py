"""A template for a pipeline of your own with DALI: copy this file, change it, and run ``minato-gpu check FILE``.

It reads photographs, decodes them, mirrors some and scales them to one size. ``check`` runs both implementations of
each stage on the same samples with the same drawn values, without a GPU as well. Where the standard stages of
``minato_gpu.pipelines.photograph_stages`` are enough, use those: they decode no more of a file than a crop needs.

What is said of a stage's fields with ``writes`` can be asked for: leave it empty (``writes={}``), and ``check`` shows
what the stage wrote.
"""

from pathlib import Path
from types import ModuleType

import cv2
import numpy as np

from minato_gpu import Pipeline, Source, Stage, read_bytes
from minato_gpu.pipeline.pipeline import DaliFragment, Field, Tolerance
from minato_gpu.pipeline.stages import Fields, Params

SIZE = 224
MEAN, STD = 0.45, 0.225  # of grey levels in the range 0 to 1

# Everything that workers need is at module level (or a functools.partial of it), so that they can be spawned.


class Photographs:
    """The data set returns what the first stages read. A "path" is named in errors."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(str(path) for path in Path(folder).glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Fields:
        return {"path": self.paths[index], "number": np.int64(index)}

    def source(self, index: int) -> Source:  # optional: where the bytes lie, to be read ahead and kept (``cache``)
        return Source(self.paths[index])


def read(fields: Fields, params: Params) -> Fields:
    return {"encoded": read_bytes(fields["path"])}


def cost(fields: Fields) -> tuple[float]:  # numbers that predict what a sample costs, from what the host has read
    return (float(fields["encoded"].size),)


def draw_mirror(rng: np.random.Generator, meta: Fields) -> Params:
    # A whole number: DALI's operators take no bool as an argument. ``rng`` is the sample's own; DALI's random
    # operators are not used, or the lanes would make different samples.
    return {"mirror": int(rng.random() < 0.5)}


def picture(fields: Fields, params: Params) -> Fields:
    image = cv2.imdecode(fields["encoded"], cv2.IMREAD_COLOR_RGB)
    if image is None:
        raise ValueError("OpenCV cannot decode this picture")
    image = cv2.resize(image, (SIZE, SIZE), interpolation=cv2.INTER_LINEAR)
    return {"image": cv2.flip(image, 1) if params["mirror"] else image}


def picture_dali(dali: ModuleType, fields: Fields, params: Params, device: str) -> Fields:
    """A piece of a DALI graph; ``fields`` and ``params`` are nodes, so Python's ``if`` and ``int`` cannot look at them.

    ``dali`` is the module ``nvidia.dali`` (do not import it), ``device`` "cpu" or "gpu".
    """
    # A GPU's decoder takes its bytes on the host: "mixed" here, and the field in ``host_reads`` below.
    image = dali.fn.decoders.image(
        fields["encoded"], device="mixed" if device == "gpu" else "cpu", jpeg_fancy_upsampling=True
    )
    # DALI antialiases where it makes a picture smaller, OpenCV's INTER_LINEAR does not.
    image = dali.fn.resize(image, size=[SIZE, SIZE], interp_type=dali.types.INTERP_LINEAR, antialias=False)
    return {"image": dali.fn.flip(image, horizontal=params["mirror"])}


def normalise(fields: Fields, params: Params) -> Fields:
    values = fields["image"].astype(np.float32) / np.float32(255)
    return {"image": np.ascontiguousarray(((values - MEAN) / STD).transpose(2, 0, 1), np.float32)}


def normalise_dali(dali: ModuleType, fields: Fields, params: Params, device: str) -> Fields:
    scaled = {"mean": [255 * MEAN], "std": [255 * STD], "dtype": dali.types.FLOAT}
    return {"image": dali.fn.crop_mirror_normalize(fields["image"], output_layout="CHW", **scaled)}


def pipeline() -> Pipeline:
    stages = (
        Stage(  # without a device implementation: on the host only
            "read",
            reads=("path",),
            writes={"encoded": Field(np.uint8, (None,))},  # None: a size that varies
            cpu=read,
            features=cost,
            feature_names=("bytes",),
        ),
        Stage(
            "picture",
            reads=("encoded",),
            writes={"image": Field(np.uint8, (SIZE, SIZE, 3), layout="HWC")},  # for DALI
            cpu=picture,
            device=DaliFragment(picture_dali, host_reads=("encoded",)),
            draw=draw_mirror,
            tolerance={"cpu": Tolerance(3, 0.5), "cuda": Tolerance(10, 1)},  # the largest and the mean, in levels
        ),
        Stage(
            "normalise",
            reads=("image",),
            # A level is one grey level of the picture, here 1/255/STD. Left out, it is 1.0, which is a quarter of the
            # range of these values: a limit of 3 levels would let anything pass.
            writes={"image": Field(np.float32, (3, SIZE, SIZE), layout="CHW", level=1 / (255 * STD))},
            cpu=normalise,
            device=DaliFragment(normalise_dali),
            tolerance={"cpu": Tolerance(0.001, 0.001), "cuda": Tolerance(0.001, 0.001)},
        ),
    )
    inputs = {"path": Field(object), "number": Field(np.int64)}
    return Pipeline(stages, inputs=inputs, outputs=("image", "number"))


dataset = Photographs  # of a folder: for ``check``


def example_data(folder: str) -> None:
    """Writes samples to compare on: as odd as yours may be, in size and content."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number in range(8):
        rng, height, width = np.random.default_rng(number), 100 + 90 * number, 500 - 50 * number
        squares = rng.integers(0, 256, (height // 6, width // 6, 3), np.uint8)
        cv2.imwrite(str(Path(folder) / f"{number}.jpg"), cv2.resize(squares, (width, height)))
