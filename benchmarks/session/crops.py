"""What PyTorch's and SPDL's workers make of a sample, and batches of those that are ready to travel: a decoded crop, or
the file's bytes, for torchvision to decode on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.compare.workloads import INDEX
from benchmarks.peers import Job
from benchmarks.session.transforms import Batch
from minato_gpu.extras import from_extra
from minato_gpu.samples import sample_seed
from pipelines.decoding import decode_box
from pipelines.headers import read_header

with from_extra("bench"):
    import cv2


class Drawn:
    """The samples of a job with the pipeline's own draws, before anything is decoded."""

    def __init__(self, job: Job) -> None:
        self._job = job
        names = [stage.name for stage in job.pipeline.stages]
        self._decode, self._flip = names.index("decode"), names.index("flip")

    def __len__(self) -> int:
        return len(self._job.source)

    def draw(self, index: int) -> dict[str, Any]:
        """encoded: the file's bytes; box: of the upright picture, top, left, height, width; mirror; label; index."""
        pipeline = self._job.pipeline
        seed = sample_seed(self._job.dataset.seed, 0, index, 0)
        fields = pipeline.run(self._job.source[index], seed, stop=self._decode)
        return {
            "encoded": fields["encoded"],
            "box": tuple(int(n) for n in fields["box"]),
            "mirror": bool(pipeline.draw(self._flip, fields, seed)["mirror"]),
            "label": int(fields["label"]),
            INDEX: index,
        }


class Files(Drawn):
    """A map-style data set of files' bytes. ``plain``: a JPEG without an Exif orientation, which nvJPEG decodes."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.draw(index)
        encoded = sample["encoded"].tobytes()
        return {**sample, "plain": encoded[:2] == b"\xff\xd8" and read_header(encoded).orientation == 1}


class Crops(Drawn):
    """A map-style data set of decoded crops, uint8 [height, width, 3], with what is left to be done to them.

    ``decoder``: "opencv" decodes the whole photograph and cuts; "nvimgcodec", this project's own, only the crop.
    ``squares``: they are resized here, so that less travels and less is left.
    """

    def __init__(self, job: Job, decoder: str, *, squares: bool, size: int) -> None:
        super().__init__(job)
        self._decoder, self._squares, self._size = decoder, squares, size

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.draw(index)
        pixels = self._cut(sample.pop("encoded"), sample.pop("box"))
        if self._squares:
            pixels = cv2.resize(pixels, (self._size, self._size), interpolation=cv2.INTER_LINEAR)
        return {"pixels": pixels, **sample}

    def _cut(self, encoded: Any, box: tuple[int, ...]) -> Any:
        top, left, height, width = box
        if self._decoder == "nvimgcodec":
            return decode_box(encoded, (top, left, height, width))
        picture = cv2.imdecode(encoded, cv2.IMREAD_COLOR_RGB)
        if picture is None:
            raise ValueError("OpenCV cannot decode this picture")
        return picture[top : top + height, left : left + width]


def packed(samples: list[dict[str, Any]], *, squares: bool) -> Batch:
    """Crops as one batch (see ``transforms.Batch``); a worker process makes it in shared memory, as torch's collate
    function does."""
    crops = [sample["pixels"] for sample in samples]
    extent = torch.tensor([crop.shape[:2] for crop in crops])
    counts = extent.prod(1)
    if squares:
        pixels = _room((len(crops), *crops[0].shape))
        np.stack(crops, out=pixels.numpy())
    else:
        pixels = _room((int(counts.sum()), 3))
        np.concatenate([crop.reshape(-1, 3) for crop in crops], out=pixels.numpy())
    return {"pixels": pixels, "start": counts.cumsum(0) - counts, "extent": extent, **_columns(samples)}


def joined(samples: list[dict[str, Any]]) -> Batch:
    """Files' bytes as one batch. encoded: uint8, one file after the other; length: int64 [batch], the bytes of each;
    box: int64 [batch, 4]; plain: bool [batch]; the rest as in ``transforms.Batch``."""
    files = [sample["encoded"] for sample in samples]
    encoded = _room((sum(len(file) for file in files),))
    np.concatenate(files, out=encoded.numpy())
    length = torch.tensor([len(file) for file in files])
    return {"encoded": encoded, "length": length, **_columns(samples, "box", "plain")}


def _columns(samples: list[dict[str, Any]], *more: str) -> Batch:
    return {name: torch.tensor([sample[name] for sample in samples]) for name in (*more, "mirror", "label", INDEX)}


def _room(shape: tuple[int, ...]) -> torch.Tensor:
    if torch.utils.data.get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(int(np.prod(shape)))
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


class Packing:
    """``packed`` as a collate function that pickles."""

    def __init__(self, *, squares: bool) -> None:
        self.squares = squares

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        return packed(samples, squares=self.squares)
